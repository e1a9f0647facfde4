"""What a run's journal says of the run so far.

Invariant: a fresh run has an empty history, and a resumed run continues from its history alone;
nothing finished is lost, nothing is delivered under two numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rollout.engine.evaluate import EvalReport
from rollout.journal.reader import Delivery, delivered_groups, index_journal, read_records, undelivered_groups
from rollout.journal.records import EvalRecord, GroupRecord, StepRecord
from rollout.types import Group, Reward


@dataclass
class History:
    """Filled from the journal at the start, then kept up to date by the phases."""

    evals: dict[str, EvalReport] = field(default_factory=dict)
    finished: Counter[str] = field(default_factory=Counter)
    """Finished training groups by task."""
    deliveries: list[Delivery] = field(default_factory=list)
    """Of whole steps that the learner's checkpoint does not contain, in order."""
    begun: list[Delivery] = field(default_factory=list)
    """Of the step whose deliveries were being written when the run was killed; never sent."""
    undelivered: list[Group] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each delivered step."""
    metrics: list[StepRecord] = field(default_factory=list)
    """The learner's figures of each step, supervised ones included."""


def load_history(run_dir: Path, *, next_delivery_seq: int, groups_per_batch: int) -> History:
    """Reads the journal (blocking; call it in a thread).

    Args:
        next_delivery_seq: the first delivery that the learner's checkpoint does not contain.
        groups_per_batch: groups of a whole step.

    Raises:
        JournalFault: damage.
    """
    history = History()
    if not index_journal(run_dir).num_records:
        return history
    for record in read_records(run_dir):
        match record:
            case EvalRecord():
                history.evals[record.report.name] = record.report
            case GroupRecord(purpose="train"):
                history.finished[record.group.task_id] += 1
            case StepRecord():
                history.metrics.append(record)
            case _:
                pass
    by_step: dict[int, list[Delivery]] = {}
    for delivery in delivered_groups(run_dir):
        by_step.setdefault(delivery.step, []).append(delivery)
    for step in sorted(by_step):
        deliveries = by_step[step]
        if len(deliveries) < groups_per_batch:
            history.begun = deliveries
            continue
        history.rewards.append(mean([mean_reward(delivery.group) for delivery in deliveries]))
        history.deliveries += [one for one in deliveries if one.seq_start >= next_delivery_seq]
    history.undelivered = list(undelivered_groups(run_dir))
    return history


def mean_reward(group: Group) -> float:
    """Mean over the siblings that have a reward; 0 when none has."""
    return mean([t.reward.value for t in group.trajectories if isinstance(t.reward, Reward)])


def mean(values: list[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
