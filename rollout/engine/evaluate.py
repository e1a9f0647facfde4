"""Pass rates of a policy on a set of tasks, with their uncertainty.

Owns the counting. Invariants: a sample without a reward (a fault of ours) is counted as invalid
and is no part of any rate; pass@k is the unbiased estimator; the same code counts before and
after training.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from rollout.tasks.types import Task
from rollout.types import DroppedGroup, Group, Reward, Trajectory

Z_95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""


class Rate(msgspec.Struct, frozen=True):
    """A share of samples and its 95 % confidence interval (Wilson 1927)."""

    passed: int
    total: int
    rate: float
    low: float
    high: float


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """One task's counts."""

    task_id: str
    domain: str
    difficulty: str
    num_samples: int
    """With a reward."""
    num_invalid: int
    num_visible: int
    """Samples that passed the visible tests, of `num_visible_tested` that have a verdict on them."""
    num_hidden: int
    """Samples that passed the hidden tests, of `num_hidden_tested`."""
    num_solved: int
    """Samples with the full reward."""
    reward_sum: float
    num_visible_tested: int = 0
    num_hidden_tested: int = 0


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of a subset of tasks."""

    name: str
    num_tasks: int
    num_samples: int
    visible: Rate
    hidden: Rate
    pass_at_1: float


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation."""

    name: str
    weight_version: int
    temperature: float
    num_tasks: int
    num_samples: int
    """Samples with a reward, over all tasks."""
    num_invalid: int
    """Samples lost to faults of ours."""
    samples_per_task: int
    visible: Rate
    hidden: Rate
    mean_reward: float
    pass_at: dict[int, float]
    """Unbiased pass@k by k, over the tasks that have at least k samples."""
    by_domain: tuple[Slice, ...]
    by_difficulty: tuple[Slice, ...]
    tasks: tuple[TaskRow, ...]
    stop_reasons: dict[str, int]
    num_action_tokens: int
    wall_s: float
    causes: tuple[str, ...] = ()
    """Why samples were lost, each cause once, a few of them."""

    @property
    def pass_at_1(self) -> float:
        """Share of samples with the full reward, averaged over tasks."""
        return self.pass_at.get(1, 0.0)


def wilson(passed: int, total: int) -> Rate:
    """Rate with Wilson's score interval, which stays inside [0, 1] and is sound near its ends."""
    if total == 0:
        return Rate(0, 0, 0.0, 0.0, 1.0)
    share, z2 = passed / total, Z_95 * Z_95
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return Rate(passed, total, share, max(0.0, centre - half), min(1.0, centre + half))


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that one of k samples drawn from these passes: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374)."""
    assert 0 <= num_passed <= num_samples, (num_samples, num_passed)
    assert 1 <= k <= num_samples, (num_samples, k)
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


class EvalTally:
    """Collects groups, keeps counts only.

    Args:
        tasks: everything that is evaluated; their ids are distinct.
        samples_per_task: episodes of each.
    """

    def __init__(self, tasks: Iterable[Task], samples_per_task: int) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._samples_per_task = samples_per_task
        self._rows: dict[str, TaskRow] = {}
        self._stop_reasons: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._num_action_tokens = 0

    def add(self, group: Group | DroppedGroup) -> None:
        """Counts one group."""
        task = self._tasks[group.task_id]
        if isinstance(group, DroppedGroup):
            self._causes[group.reason] += 1
            self._rows[task.id] = _row(task, (), self._samples_per_task)
            return
        valid = [t for t in group.trajectories if isinstance(t.reward, Reward)]
        for trajectory in group.trajectories:
            self._stop_reasons[trajectory.stop_reason.value] += 1
            self._num_action_tokens += sum(trajectory.loss_mask)
            if not isinstance(trajectory.reward, Reward):
                self._causes[trajectory.reward.reason] += 1
        self._rows[task.id] = _row(task, valid, len(group.trajectories) - len(valid))

    @property
    def num_samples(self) -> int:
        """Samples with a reward so far."""
        return sum(row.num_samples for row in self._rows.values())

    def main_cause(self) -> str:
        """The most frequent reason for a lost sample or group."""
        return next((cause for cause, _ in self._causes.most_common(1)), "no group came back")

    def report(self, *, name: str, temperature: float, weight_version: int, wall_s: float) -> EvalReport:
        """The rates of everything counted so far, tasks in their given order."""
        rows = [self._rows[task_id] for task_id in self._tasks if task_id in self._rows]
        num_samples = sum(row.num_samples for row in rows)
        ks = [k for k in sorted({1, 2, 4, 8, 16, 32, 64, self._samples_per_task}) if k <= self._samples_per_task]
        return EvalReport(
            name=name,
            weight_version=weight_version,
            temperature=temperature,
            num_tasks=len(rows),
            num_samples=num_samples,
            num_invalid=sum(row.num_invalid for row in rows),
            samples_per_task=self._samples_per_task,
            visible=_visible_rate(rows),
            hidden=_hidden_rate(rows),
            mean_reward=sum(row.reward_sum for row in rows) / num_samples if num_samples else 0.0,
            pass_at={k: _mean_pass_at(rows, k) for k in ks},
            by_domain=_slices(rows, "domain"),
            by_difficulty=_slices(rows, "difficulty"),
            tasks=tuple(rows),
            stop_reasons=dict(self._stop_reasons),
            num_action_tokens=self._num_action_tokens,
            wall_s=wall_s,
            causes=tuple(cause for cause, _ in self._causes.most_common(5)),
        )


def _row(task: Task, valid: Sequence[Trajectory], num_invalid: int) -> TaskRow:
    rewards = [t.reward.value for t in valid if isinstance(t.reward, Reward)]
    return TaskRow(
        task_id=task.id,
        domain=task.domain,
        difficulty=task.difficulty,
        num_samples=len(valid),
        num_invalid=num_invalid,
        num_visible=sum(_layer_passed(t, "visible") for t in valid),
        num_hidden=sum(_layer_passed(t, "hidden") for t in valid),
        num_solved=sum(reward >= 1.0 for reward in rewards),
        reward_sum=sum(rewards),
        num_visible_tested=sum(t.verdict.layer("visible") is not None for t in valid),
        num_hidden_tested=sum(t.verdict.layer("hidden") is not None for t in valid),
    )


def _layer_passed(trajectory: Trajectory, layer: str) -> bool:
    verdict = trajectory.verdict.layer(layer)
    return verdict is not None and verdict.passed


def _visible_rate(rows: Sequence[TaskRow]) -> Rate:
    return wilson(sum(row.num_visible for row in rows), sum(row.num_visible_tested for row in rows))


def _hidden_rate(rows: Sequence[TaskRow]) -> Rate:
    return wilson(sum(row.num_hidden for row in rows), sum(row.num_hidden_tested for row in rows))


def _mean_pass_at(rows: Sequence[TaskRow], k: int) -> float:
    values = [pass_at_k(row.num_samples, row.num_solved, k) for row in rows if row.num_samples >= k]
    return sum(values) / len(values) if values else 0.0


def _slices(rows: Sequence[TaskRow], field: str) -> tuple[Slice, ...]:
    names = sorted({getattr(row, field) for row in rows})
    return tuple(_slice(name, [row for row in rows if getattr(row, field) == name]) for name in names)


def _slice(name: str, rows: Sequence[TaskRow]) -> Slice:
    return Slice(
        name=name or "-",
        num_tasks=len(rows),
        num_samples=sum(row.num_samples for row in rows),
        visible=_visible_rate(rows),
        hidden=_hidden_rate(rows),
        pass_at_1=_mean_pass_at(rows, 1),
    )


def format_report(report: EvalReport) -> str:
    """The report as a table for terminals and logs."""
    lines = [
        f"{report.name}: {report.num_tasks} tasks x {report.samples_per_task} samples at temperature "
        f"{report.temperature:g}, weight version {report.weight_version}",
        f"  visible  {_format_rate(report.visible)}",
        f"  hidden   {_format_rate(report.hidden)}",
        "  " + "   ".join(f"pass@{k} {value:.3f}" for k, value in report.pass_at.items()),
        f"  mean reward {report.mean_reward:.3f}, {report.num_action_tokens} sampled tokens, {report.wall_s:.1f} s",
    ]
    if report.num_invalid:
        lines.append(f"  {report.num_invalid} samples lost to faults: {'; '.join(report.causes)}")
    for title, slices in (("domain", report.by_domain), ("difficulty", report.by_difficulty)):
        if len(slices) > 1:
            lines.append(f"  {title:<16} tasks  visible                 hidden                  pass@1")
            lines.extend(
                f"  {part.name:<16} {part.num_tasks:>5}  {_short_rate(part.visible):<22}  "
                f"{_short_rate(part.hidden):<22}  {part.pass_at_1:.3f}"
                for part in slices
            )
    return "\n".join(lines)


def _format_rate(rate: Rate) -> str:
    if rate.total == 0:
        return "no such tests"
    return f"{rate.rate:.3f}  ({rate.passed} of {rate.total}; 95 % interval {rate.low:.3f} to {rate.high:.3f})"


def _short_rate(rate: Rate) -> str:
    if rate.total == 0:
        return "-"
    return f"{rate.rate:.3f} [{rate.low:.3f}, {rate.high:.3f}]"
