"""What a run's journal says of the run so far.

Invariant: a fresh run has an empty history, and a resumed run continues from its history alone;
nothing finished is lost, nothing is delivered under two numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rollout.engine.evaluate import EvalReport
from rollout.errors import JournalFault
from rollout.journal.reader import Delivery, delivered_groups, index_journal, read_records, undelivered_groups
from rollout.journal.records import EvalRecord, GroupRecord, RunHeader, StepRecord
from rollout.types import Group, Reward

BEFORE, AFTER = "before", "after"
"""Names of a run's two evaluations."""


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
    num_processes: int = 1
    """Processes that have worked on the run, the present one included."""
    metrics: list[StepRecord] = field(default_factory=list)
    """The learner's figures of each step, supervised ones included."""


def load_history(run_dir: Path, *, steps_done: int, next_delivery_seq: int, groups_per_batch: int) -> History:
    """Reads the journal (blocking; call it in a thread).

    Args:
        steps_done: RL steps in the learner's checkpoint.
        next_delivery_seq: the first delivery that the learner's checkpoint does not contain.
        groups_per_batch: groups of a whole step.

    Raises:
        JournalFault: damage; or the checkpoint knows of more than the journal, which was lost or cut.
    """
    history = History()
    num_headers = 0
    for record in read_records(run_dir):
        match record:
            case RunHeader():
                num_headers += 1
            case EvalRecord():
                history.evals[record.report.name] = record.report
            case GroupRecord(purpose="train"):
                history.finished[record.group.task_id] += 1
            case StepRecord():
                history.metrics.append(record)
            case _:
                pass
    index = index_journal(run_dir)
    by_step: dict[int, list[Delivery]] = {}
    for delivery in delivered_groups(run_dir, index=index):
        by_step.setdefault(delivery.step, []).append(delivery)
    for step in sorted(by_step):
        deliveries = by_step[step]
        if len(deliveries) < groups_per_batch:
            history.begun = deliveries
            continue
        history.rewards.append(mean([mean_reward(delivery.group) for delivery in deliveries]))
        history.deliveries += [one for one in deliveries if one.seq_start >= next_delivery_seq]
    history.undelivered = list(undelivered_groups(run_dir, index=index))
    history.num_processes = max(1, num_headers)
    _check_covers(run_dir, index.next_delivery_seq, history, by_step, steps_done, next_delivery_seq)
    return history


def _check_covers(
    run_dir: Path,
    known: int,
    history: History,
    by_step: dict[int, list[Delivery]],
    steps_done: int,
    next_delivery_seq: int,
) -> None:
    """A delivery is durable before it is sent, so a journal behind the checkpoint has lost something."""
    whole = len(history.rewards)
    if whole < steps_done or known < next_delivery_seq:
        raise _lost(
            run_dir,
            f"it holds {whole} whole RL steps and {known} deliveries, "
            f"the learner's checkpoint {steps_done} steps and {next_delivery_seq} deliveries",
        )
    missing = sorted(set(range(len(by_step))) - set(by_step))
    if missing:
        raise _lost(run_dir, f"RL step {missing[0]} is missing before step {max(by_step)}")
    if steps_done and BEFORE not in history.evals:
        raise _lost(run_dir, f"the learner has {steps_done} RL steps, and the evaluation before them is missing")


def _lost(run_dir: Path, what: str) -> JournalFault:
    return JournalFault(
        f"the journal in {run_dir} has lost records: {what}. "
        "Put the journal back as it was, or start a new run in another directory"
    )


def mean_reward(group: Group) -> float:
    """Mean over the siblings that have a reward; 0 when none has."""
    return mean([t.reward.value for t in group.trajectories if isinstance(t.reward, Reward)])


def mean(values: list[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0
