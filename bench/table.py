"""The report as a person reads it.

Invariant: shows exactly the report's own figures, rounded to what fits.
"""

from __future__ import annotations

from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.records import Claim, Measure, Report, spoken

_VERDICTS = {True: "[green]holds[/]", False: "[red]does not hold[/]", None: "[yellow]not measured[/]"}


def print_report(report: Report, console: Console) -> None:
    """Prints the rows by condition, what was skipped, the claims and the notes."""
    machine = report.machine
    quick = ", quick" if report.quick else ""
    console.print(f"[bold]bench {report.benchmark}[/]{quick}: {report.wall_s:.0f} s, {report.started_at}")
    console.print(
        escape(
            f"{machine.cpu_model}, {machine.num_cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, "
            f"{machine.kernel}, load {machine.load_1m:.1f}"
        )
    )
    console.print(escape(", ".join(f"{name} {version}" for name, version in report.versions.items())))
    console.print(_measures(report.measures))
    for skipped in report.skipped:
        console.print(f"[yellow]skipped[/] {escape(skipped.name)}: {escape(skipped.reason)}")
    if report.claims:
        console.print(_claims(report.claims))
    for note in report.notes:
        console.print(f"· {escape(note)}", style="dim")


def _measures(measures: list[Measure]) -> Table:
    table = Table()
    table.add_column("")
    for heading in ("p50", "p99", "unit", "per second", "n"):
        table.add_column(heading, justify="left" if heading == "unit" else "right")
    for condition, rows in groupby(measures, key=lambda row: row.condition):
        if condition:
            table.add_section()
            table.add_row(f"[bold]{escape(condition)}[/]")
        for row in rows:
            rate = "" if row.per_second is None else figure(row.per_second)
            table.add_row(escape(row.name), figure(row.p50), figure(row.p99), row.unit, rate, str(row.n))
    return table


def _claims(claims: list[Claim]) -> Table:
    table = Table()
    for heading in ("claim", "measured", "target", ""):
        table.add_column(heading, justify="right" if heading == "measured" else "left")
    for one in claims:
        value = "" if one.value is None else f"{figure(one.value)} {one.unit}"
        table.add_row(escape(one.name), value, f"{spoken(one.target)} {one.unit}", _VERDICTS[one.holds])
    return table


def figure(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
