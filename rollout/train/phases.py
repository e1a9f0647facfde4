"""The phases of a run: supervised steps, evaluations, RL steps.

Invariant: every group is journaled before it is delivered, a delivery is durable before it is sent,
and a step is a fixed range of deliveries; so a run that was killed goes on with the same steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import anyio.to_thread
import msgspec

from rollout.engine.engine import RolloutEngine
from rollout.engine.evaluate import EvalReport
from rollout.engine.stream import GroupStream, RunOptions
from rollout.errors import JournalFault
from rollout.journal.reader import Delivery
from rollout.journal.records import PhaseRecord
from rollout.journal.writer import Journal
from rollout.lane.packing import DeliveredGroup, rl_frames, sft_frames
from rollout.tasks.types import Task
from rollout.train.config import TrainConfig
from rollout.train.history import History, mean, mean_reward
from rollout.train.link import LearnerLink
from rollout.train.progress import RunProgress
from rollout.train.source import TaskSource
from rollout.types import DroppedGroup, Group


class RunParts(msgspec.Struct, frozen=True, kw_only=True):
    """What the phases work with."""

    config: TrainConfig
    engine: RolloutEngine
    journal: Journal
    link: LearnerLink
    source: TaskSource
    history: History
    progress: RunProgress


async def run_sft(parts: RunParts) -> None:
    """Streams the demonstrations that are still due, and waits until the policy server has the result."""
    steps, batch_size = parts.config.learner.sft.steps, parts.config.learner.sft.batch_size
    link, start = parts.link, parts.link.sft_steps_done
    if start >= steps:
        return
    _begin(parts, "sft", start)
    parts.progress.phase("supervised", steps)
    version = link.weight_version
    for step in range(start, steps):
        examples = await anyio.to_thread.run_sync(parts.source.sft_batch, step, batch_size)
        await link.write(sft_frames(examples, step=step))
    await link.wait_until(
        lambda: link.sft_steps_done >= steps and link.weight_version > version,
        "the supervised steps",
        parts.config.step_timeout_s,
    )
    _end(parts, "sft", steps)


async def evaluate(parts: RunParts, name: str) -> EvalReport:
    """Evaluates the held-out tasks, or returns the evaluation of that name that the journal holds."""
    earlier = parts.history.evals.get(name)
    if earlier is not None:
        return earlier
    tasks = list(parts.source.heldout_tasks())
    parts.progress.phase(f"evaluate {name}", len(tasks))
    done = 0
    passed = 0.0

    def observe(group: Group | DroppedGroup) -> None:
        nonlocal done, passed
        done += 1
        if isinstance(group, Group):
            passed += mean_reward(group)
        parts.progress.advance(done, {"pass@1": passed / done})

    report = await parts.engine.evaluate(tasks, parts.config.tasks.heldout_samples, name=name, progress=observe)
    parts.progress.say(
        f"held-out pass@1 {name} RL: {report.pass_at_1:.3f}  "
        f"(95 % interval {report.hidden.low:.3f} to {report.hidden.high:.3f}, {report.num_samples} samples)"
    )
    return report


async def run_rl(parts: RunParts) -> None:
    """Delivers steps until the configured number is trained, or the reward is good enough."""
    config, link, history = parts.config, parts.link, parts.history
    steps = config.learner.rl.steps
    _begin(parts, "rl", link.steps_done)
    parts.progress.phase("RL", steps)
    step = await _replay(parts)
    stream = parts.engine.run(remaining_tasks(parts.source, history), RunOptions(hold=True))
    pacer = _Pacer(stream, link)
    waiting: deque[Group] = deque(history.undelivered)
    delivered = [_replayed(delivery) for delivery in history.begun]
    while step < steps and not _good_enough(parts):
        fresh = 0
        while len(delivered) + len(waiting) < config.engine.groups_per_batch:
            item = await anext(stream)
            if isinstance(item, Group):
                fresh += 1
                waiting.append(item)
        while len(delivered) < config.engine.groups_per_batch:
            delivered.append(_deliver(parts.journal, waiting.popleft(), step))
        await parts.journal.flush()
        history.rewards.append(mean([mean_reward(one.group) for one in delivered]))
        await link.write(rl_frames(delivered, step=step))
        pacer.sent(step, fresh)
        delivered = []
        step += 1
    stream.stop("the run has all its steps")
    await link.wait_until(lambda: link.published_step >= step, f"RL step {step}", config.step_timeout_s)
    _end(parts, "rl", step)


def remaining_tasks(source: TaskSource, history: History) -> Iterator[Task]:
    """Training tasks in order, without those whose groups the journal already holds."""
    finished = history.finished.copy()
    for task in source.train_tasks():
        if finished[task.id] > 0:
            finished[task.id] -= 1
        else:
            yield task


class _Pacer:
    """Frees a step's window slots once the weights that it made are in use."""

    def __init__(self, stream: GroupStream, link: LearnerLink) -> None:
        self._stream = stream
        self._link = link
        self._sent: deque[tuple[int, int]] = deque()
        link.on_published = self._published

    def sent(self, step: int, num_groups: int) -> None:
        """`num_groups` groups of the stream went into `step`."""
        self._sent.append((step, num_groups))

    def _published(self, step: int) -> None:
        while self._sent and self._sent[0][0] < step:
            self._stream.release(self._sent.popleft()[1])


async def _replay(parts: RunParts) -> int:
    """Sends again what was delivered and is not in the learner's checkpoint; returns the next step."""
    by_step: dict[int, list[Delivery]] = {}
    for delivery in parts.history.deliveries:
        by_step.setdefault(delivery.step, []).append(delivery)
    steps = sorted(by_step)
    if steps and (steps[0] != parts.link.steps_done or any(b != a + 1 for a, b in pairwise(steps))):
        raise JournalFault(f"the learner has {parts.link.steps_done} steps, the journal holds steps {steps}")
    if steps:
        parts.progress.say(f"replaying RL steps {steps[0]} to {steps[-1]} from the journal")
    for step in steps:
        await parts.link.write(rl_frames([_replayed(delivery) for delivery in by_step[step]], step=step))
    return steps[-1] + 1 if steps else parts.link.steps_done


def _deliver(journal: Journal, group: Group, step: int) -> DeliveredGroup:
    start = journal.deliver(group, step)
    return DeliveredGroup(group=group, delivery_seqs=tuple(range(start, start + len(group.trajectories))))


def _replayed(delivery: Delivery) -> DeliveredGroup:
    start, num = delivery.seq_start, len(delivery.group.trajectories)
    return DeliveredGroup(group=delivery.group, delivery_seqs=tuple(range(start, start + num)))


def _good_enough(parts: RunParts) -> bool:
    stop, rewards = parts.config.stop, parts.history.rewards
    if stop.reward is None or len(rewards) < stop.steps:
        return False
    return mean(rewards[-stop.steps :]) >= stop.reward


def _begin(parts: RunParts, name: str, step: int) -> None:
    parts.journal.append(PhaseRecord(name=name, event="begin", unix_s=time.time(), step=step))


def _end(parts: RunParts, name: str, step: int) -> None:
    parts.journal.append(PhaseRecord(name=name, event="end", unix_s=time.time(), step=step))
