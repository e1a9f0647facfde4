"""What a run came to: a struct, a JSON file, and a picture of its course.

Invariant: every figure comes from the journal's records, so that a resumed run reports the whole run;
only the wall time is the last process's own.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from rollout.engine.evaluate import EvalReport, Rate
from rollout.errors import JournalFault, boundary
from rollout.journal.records import StepRecord
from rollout.train.history import History

REPORT_FILE = "report.json"
CHART_FILE = "learning.png"


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation, without its tasks (the journal has them)."""

    pass_at_1: float
    pass_at: dict[int, float]
    visible: Rate
    hidden: Rate
    num_tasks: int
    num_samples: int
    num_invalid: int
    weight_version: int
    wall_s: float


class TrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    run_dir: str
    before: EvalSummary
    """Held-out tasks, after supervised training and before RL."""
    after: EvalSummary
    gain: float
    """pass@1 after minus before."""
    sft_steps: int
    rl_steps: int
    rewards: list[float]
    """Mean reward of each RL step's batch."""
    unenforced: tuple[str, ...]
    """Sandbox limits that this host could not enforce."""
    wall_s: float
    """Of this process; a resumed run's earlier processes are not in it."""
    num_processes: int
    """Processes that worked on the run: 1, and one more for each time it was resumed."""
    chart: str | None
    """Path of the picture; None where matplotlib is not installed."""


def make_report(
    run_dir: Path,
    *,
    before: EvalReport,
    after: EvalReport,
    history: History,
    steps: list[StepRecord],
    sft_steps: int,
    rl_steps: int,
    unenforced: tuple[str, ...],
    wall_s: float,
) -> TrainReport:
    """Makes the report and writes `report.json` and, with matplotlib, `learning.png`.

    Args:
        steps: the learner's figures of this process; those of earlier ones are in `history`.
        sft_steps: that the learner has done in all; a killed process may have lost figures of some.
        rl_steps: likewise.
    """
    latest = {(record.kind, record.step): record for record in [*history.metrics, *steps]}
    records = [latest[key] for key in sorted(latest)]
    report = TrainReport(
        run_dir=str(run_dir),
        before=_summary(before),
        after=_summary(after),
        gain=after.pass_at_1 - before.pass_at_1,
        sft_steps=sft_steps,
        rl_steps=rl_steps,
        rewards=history.rewards,
        unenforced=unenforced,
        wall_s=wall_s,
        num_processes=history.num_processes,
        chart=_draw(run_dir / CHART_FILE, before, after, history.rewards, records),
    )
    with boundary(JournalFault, f"writing {run_dir / REPORT_FILE}", OSError):
        (run_dir / REPORT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return report


def print_report(report: TrainReport, console: Console) -> None:
    """The result for a person."""
    table = Table(title="held-out tasks", title_justify="left")
    for column in ("", "pass@1", "95 % interval", "samples", "weights"):
        table.add_column(column, justify="right" if column else "left")
    for name, one in (("before RL", report.before), ("after RL", report.after)):
        interval = f"{one.hidden.low:.3f} to {one.hidden.high:.3f}"
        table.add_row(name, f"{one.pass_at_1:.3f}", interval, str(one.num_samples), f"version {one.weight_version}")
    console.print(table)
    whose = "in all" if report.num_processes == 1 else f"in the last of the run's {report.num_processes} processes"
    console.print(
        f"gain {report.gain:+.3f} in {report.rl_steps} RL steps, {report.wall_s:.0f} s {whose}",
        highlight=False,
        soft_wrap=True,
    )
    if report.unenforced:
        console.print(f"limits not enforced on this host: {', '.join(report.unenforced)} (see `rollout doctor`)")
    console.print(f"run directory: {report.run_dir}", highlight=False, soft_wrap=True)
    if report.chart:
        console.print(f"picture: {report.chart}", highlight=False, soft_wrap=True)


def _summary(report: EvalReport) -> EvalSummary:
    return EvalSummary(
        pass_at_1=report.pass_at_1,
        pass_at=report.pass_at,
        visible=report.visible,
        hidden=report.hidden,
        num_tasks=report.num_tasks,
        num_samples=report.num_samples,
        num_invalid=report.num_invalid,
        weight_version=report.weight_version,
        wall_s=report.wall_s,
    )


def _draw(
    path: Path, before: EvalReport, after: EvalReport, rewards: list[float], records: list[StepRecord]
) -> str | None:
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    sft = [(record.step, record.metrics["loss"]) for record in records if record.kind == "sft"]
    left.plot([step for step, _ in sft], [loss for _, loss in sft], linewidth=0.8)
    left.set(title="supervised", xlabel="step", ylabel="cross-entropy (nats per token)")
    right.plot(range(1, len(rewards) + 1), rewards, linewidth=1.2, label="mean reward of the batch")
    for x, one, name in ((0, before, "before"), (len(rewards), after, "after")):
        error = [[one.pass_at_1 - one.hidden.low], [one.hidden.high - one.pass_at_1]]
        right.errorbar([x], [one.pass_at_1], yerr=error, fmt="o", capsize=3, label=f"held-out pass@1 {name} RL")
    right.set(title="reinforcement learning", xlabel="step", ylim=(0, 1))
    right.legend(loc="lower right", fontsize="small")
    with boundary(JournalFault, f"writing {path}", OSError):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return str(path)
