"""One episode: a conversation of policy and environment, judged at its end. Read this first.

Owns the loop over turns and its budgets. Invariants: an episode ends with a `Trajectory` or
raises a `Fault`, within `max_episode_s` plus `verify_timeout_s`; a budget that runs out is an
outcome with its own stop reason, and what was sampled until then is kept and judged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

import anyio
import msgspec

from rollout.engine.parts import Parts
from rollout.engine.record import TokenRecord
from rollout.environment.types import LiveEnvironment, Reaction
from rollout.errors import VerifierFault, boundary
from rollout.rendering.types import strip_stop
from rollout.sampler.types import Action, Origin, SampleRequest
from rollout.tasks.types import Task
from rollout.types import Invalid, StopReason, Trajectory, Turn, Verdict, well_formed
from sandbox.errors import SandboxError


class EpisodeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Which episode to run."""

    task: Task
    group_id: int
    sibling: int
    attempt: int
    temperature: float
    seed_key: str
    """Names the group in the derivation of request seeds."""
    cache_salt: str | None = None

    @property
    def trajectory_id(self) -> str:
        """See `Trajectory.trajectory_id`."""
        return f"{self.group_id}/{self.sibling}/{self.attempt}"


@dataclass
class _Draft:
    """The episode so far."""

    record: TokenRecord
    turns: list[Turn] = field(default_factory=list)
    submission: str | None = None
    stop: StopReason | None = None


async def run_episode(parts: Parts, job: EpisodeJob, prompt: list[int]) -> Trajectory:
    """Runs and judges one episode.

    Args:
        parts: what to work with.
        job: which episode.
        prompt: the task's prompt tokens, as the renderer made them.

    Raises:
        Fault: ours; there is no outcome.

    Cancellation ends the request, the environment and the verdict, and is passed on.
    """
    started = anyio.current_time()
    draft = _Draft(TokenRecord(prompt))
    with anyio.move_on_after(min(parts.config.max_episode_s, job.task.limits.episode_timeout_s)) as deadline:
        async with parts.environment.open(job.task) as live:
            await _converse(parts, job, draft, live)
    if deadline.cancelled_caught:
        draft.stop = StopReason.TIMEOUT
    verdict = await _judge(parts, job.task, draft.submission)
    trajectory = _finish(job, draft, verdict, anyio.current_time() - started)
    seed = parts.config.seed
    return trajectory if seed is None else msgspec.structs.replace(trajectory, seed=_request_seed(seed, job, 0))


async def _converse(parts: Parts, job: EpisodeJob, draft: _Draft, live: LiveEnvironment) -> None:
    """Turn after turn, until the environment or a budget ends it."""
    max_turns = parts.environment.max_turns(job.task)
    for turn in range(max_turns):
        last = turn + 1 == max_turns
        action = await _sample(parts, job, draft.record, turn)
        draft.record.append_action(action)
        text = well_formed(parts.renderer.decode(action.token_ids))
        draft.turns.append(
            Turn(
                action=text,
                submission=None,
                observation="",
                finish_reason=action.finish_reason,
                num_action_tokens=len(action.token_ids),
            )
        )
        started = anyio.current_time()
        reaction = await live.act(text, last=last)
        parts.metrics.act_s += anyio.current_time() - started
        _note(draft, reaction)
        if reaction.done:
            draft.stop = _stop_of(action, reaction, max_turns)
            return
        if not _observe(parts, draft, action, reaction.observation):
            draft.stop = StopReason.MAX_TOKENS
            return
    draft.stop = StopReason.MAX_TURNS


async def _sample(parts: Parts, job: EpisodeJob, record: TokenRecord, turn: int) -> Action:
    config = parts.config
    request = SampleRequest(
        token_ids=record.context(),
        max_tokens=min(config.max_tokens, config.max_context_tokens - len(record)),
        temperature=job.temperature,
        stop_token_ids=parts.renderer.stop_token_ids,
        seed=None if config.seed is None else _request_seed(config.seed, job, turn),
        cache_salt=job.cache_salt,
        timeout_s=config.request_timeout_s,
        origin=Origin(task=job.task, sibling=job.sibling, turn=turn),
    )
    started = anyio.current_time()
    action = await parts.sampler.sample(request)
    parts.metrics.sample_s += anyio.current_time() - started
    parts.metrics.turns += 1
    parts.metrics.action_tokens += len(action.token_ids)
    return action


def _note(draft: _Draft, reaction: Reaction) -> None:
    """Completes the newest turn; the latest program submitted is the one that is judged."""
    if reaction.submission is not None:
        draft.submission = reaction.submission
    draft.turns[-1] = msgspec.structs.replace(
        draft.turns[-1], submission=reaction.submission, commands=reaction.commands, visible=reaction.visible
    )


def _observe(parts: Parts, draft: _Draft, action: Action, observation: str) -> bool:
    """Appends the observation; False when the context has no room for it and one more token."""
    closed = len(strip_stop(action.token_ids, parts.renderer.stop_token_ids)) < len(action.token_ids)
    observation = well_formed(observation)
    suffix = parts.renderer.observation(observation, closed=closed)
    if len(draft.record) + len(suffix) >= parts.config.max_context_tokens:
        return False
    draft.record.append_observation(suffix)
    draft.turns[-1] = msgspec.structs.replace(draft.turns[-1], observation=observation)
    return True


def _stop_of(action: Action, reaction: Reaction, max_turns: int) -> StopReason:
    """Why an episode that its environment called done has ended, as far as is known before the verdict."""
    if reaction.visible is not None and reaction.visible.passed:
        return StopReason.SUBMITTED
    if action.finish_reason == "length":
        return StopReason.MAX_TOKENS
    return StopReason.SUBMITTED if max_turns == 1 else StopReason.MAX_TURNS


async def _judge(parts: Parts, task: Task, submission: str | None) -> Verdict:
    started = anyio.current_time()
    try:
        with boundary(VerifierFault, f"verifying {task.id}", SandboxError, OSError):
            with anyio.fail_after(parts.config.verify_timeout_s):
                return await parts.judge.verify(task, submission)
    finally:
        parts.metrics.verify_s += anyio.current_time() - started


def _finish(job: EpisodeJob, draft: _Draft, verdict: Verdict, wall_s: float) -> Trajectory:
    columns = draft.record.columns()
    turns = draft.turns
    visible = verdict.layer("visible")
    if turns and turns[-1].visible is None and turns[-1].submission is not None:
        turns[-1] = msgspec.structs.replace(turns[-1], visible=visible)
    stop = draft.stop or StopReason.TIMEOUT
    if stop is StopReason.MAX_TURNS and visible is not None and visible.passed and turns[-1].submission is not None:
        stop = StopReason.SUBMITTED
    return Trajectory(
        trajectory_id=job.trajectory_id,
        task_id=job.task.id,
        group_id=job.group_id,
        sibling=job.sibling,
        token_ids=columns.token_ids,
        loss_mask=columns.loss_mask,
        logprobs=columns.logprobs,
        spans=columns.spans,
        temperature=job.temperature,
        turns=tuple(turns),
        verdict=verdict,
        stop_reason=stop,
        wall_s=wall_s,
        turn_rewards=_turn_rewards(turns, verdict),
    )


def _turn_rewards(turns: list[Turn], verdict: Verdict) -> tuple[float | None, ...]:
    """See `Trajectory.turn_rewards`."""
    if not turns:
        return ()
    earlier = [float(turn.visible is not None and turn.visible.passed) for turn in turns[:-1]]
    final = None if isinstance(verdict.reward, Invalid) else verdict.reward.value
    return (*earlier, final)


def _request_seed(seed: int, job: EpisodeJob, turn: int) -> int:
    """31 bits that depend on the run's seed, the group, the sibling and the turn, not on the attempt."""
    key = f"{seed} {job.seed_key} {job.sibling} {turn}".encode()
    return int.from_bytes(blake2b(key, digest_size=4).digest(), "big") >> 1
