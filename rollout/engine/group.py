"""One group: siblings of one task, and the failure algebra.

The only place where faults are handled: a fault costs one new attempt of that one sample, and
after the last attempt the sample is masked. Invariant: a group that leaves as `Group` has all its
siblings, at least one of them valid; masked ones are no part of the statistics.
"""

from __future__ import annotations

import anyio
import msgspec

from rollout.advantage import advantages
from rollout.engine.episode import EpisodeJob, run_episode
from rollout.engine.parts import FaultBudget, Parts
from rollout.errors import Fault, VerifierFault
from rollout.tasks.types import Task
from rollout.types import DroppedGroup, Group, Invalid, Reward, StopReason, Trajectory, Verdict


class GroupJob(msgspec.Struct, frozen=True, kw_only=True):
    """Which group to run."""

    group_id: int
    task: Task
    group_size: int
    temperature: float
    seed_key: str
    cache_salt: str | None = None


async def run_group(parts: Parts, job: GroupJob, budget: FaultBudget) -> Group | DroppedGroup:
    """Runs all siblings at once.

    Raises:
        RunFault: the budget of faults is spent (inside an exception group).

    Cancellation ends every sibling and is passed on.
    """
    prompt = parts.renderer.prompt(job.task)
    if len(prompt) >= parts.config.max_context_tokens:
        reason = f"its prompt has {len(prompt)} tokens, the context {parts.config.max_context_tokens}"
        return DroppedGroup(group_id=job.group_id, task_id=job.task.id, reason=reason)
    trajectories: dict[int, Trajectory] = {}

    async def run_sibling(sibling: int) -> None:
        async with parts.slots:
            parts.metrics.episodes_live += 1
            try:
                trajectories[sibling] = await _run_sample(parts, job, sibling, prompt, budget)
            finally:
                parts.metrics.episodes_live -= 1

    async with anyio.create_task_group() as siblings:
        for sibling in range(job.group_size):
            siblings.start_soon(run_sibling, sibling)
    return _complete(parts, job, [trajectories[sibling] for sibling in range(job.group_size)])


async def _run_sample(parts: Parts, job: GroupJob, sibling: int, prompt: list[int], budget: FaultBudget) -> Trajectory:
    """One sample, refilled after faults, masked when every attempt failed."""
    faults: list[str] = []
    for attempt in range(parts.config.max_sample_retries + 1):
        if attempt:
            await anyio.sleep(parts.config.retry_backoff_s * 2 ** (attempt - 1))
        episode = EpisodeJob(
            task=job.task,
            group_id=job.group_id,
            sibling=sibling,
            attempt=attempt,
            temperature=job.temperature,
            seed_key=job.seed_key,
            cache_salt=job.cache_salt,
        )
        parts.metrics.attempts += 1
        try:
            trajectory = await run_episode(parts, episode, prompt)
        except Fault as fault:
            parts.metrics.faults[type(fault).__name__] += 1
            faults.append(f"{type(fault).__name__}: {fault}")
            budget.failed(fault)
            continue
        if isinstance(trajectory.reward, Invalid):
            parts.metrics.faults["VerifierFault"] += 1
            budget.failed(VerifierFault(trajectory.reward.reason))
        else:
            budget.succeeded()
        parts.metrics.episodes_finished += 1
        parts.metrics.stop_reasons[trajectory.stop_reason.value] += 1
        return msgspec.structs.replace(trajectory, faults=tuple(faults))
    return _masked(job, sibling, prompt, faults)


def _masked(job: GroupJob, sibling: int, prompt: list[int], faults: list[str]) -> Trajectory:
    """The place holder of a sample whose every attempt failed: its prompt, and why."""
    return Trajectory(
        trajectory_id=f"{job.group_id}/{sibling}/{len(faults) - 1}",
        task_id=job.task.id,
        group_id=job.group_id,
        sibling=sibling,
        token_ids=list(prompt),
        loss_mask=[False] * len(prompt),
        logprobs=[0.0] * len(prompt),
        spans=(),
        temperature=job.temperature,
        turns=(),
        verdict=Verdict(task_id=job.task.id, reward=Invalid(faults[-1])),
        stop_reason=StopReason.FAULT,
        faults=tuple(faults),
    )


def _complete(parts: Parts, job: GroupJob, trajectories: list[Trajectory]) -> Group | DroppedGroup:
    rewards = [t.reward.value if isinstance(t.reward, Reward) else 0.0 for t in trajectories]
    valid = [isinstance(t.reward, Reward) for t in trajectories]
    if not any(valid):
        causes = sorted({t.reward.reason for t in trajectories if isinstance(t.reward, Invalid)})
        return DroppedGroup(
            group_id=job.group_id, task_id=job.task.id, reason=f"no sample has a reward: {'; '.join(causes[:3])}"
        )
    return Group(
        group_id=job.group_id,
        task_id=job.task.id,
        trajectories=tuple(trajectories),
        advantages=tuple(float(a) for a in advantages(rewards, valid, parts.config.estimator)),
    )
