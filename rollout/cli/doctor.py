"""`rollout doctor`: what this host can isolate and enforce, and how to turn on what is missing.

Owns: the page that a person reads. Invariant: exit status 0 means that a sandbox really ran and held.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from sandbox.health.doctor import Report


def add_parser(subparsers: Any) -> None:
    """Declare the flags."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="say what this host can isolate and enforce, with remedies",
        description="Start a real sandbox, look around in it, and name every limit that does not hold here. "
        "Exit status: 0 when it isolates, 1 when it does not.",
    )
    parser.add_argument("--jail", default="bubblewrap", metavar="NAME", help="bubblewrap (default) or nsjail")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where images and engines' records live")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    """Examine the host and print the report."""
    from rich.console import Console

    from rollout.cli.output import print_json
    from sandbox.health.doctor import examine
    from sandbox.loop import run_on_loop
    from sandbox.types import check_jail

    jail = check_jail("--jail", arguments.jail)

    async def look() -> Report:
        return await examine(arguments.state_dir, jail)

    report = run_on_loop(look)
    if arguments.json:
        print_json(report)
    else:
        render(report, Console())
    return 0 if report.isolates else 1


def render(report: Report, console: Console) -> None:
    """Print the report as tables: the verdict first, then what needs attention."""
    from rich.markup import escape
    from rich.table import Table

    if report.isolates:
        console.print(f"[bold green]isolates[/]: a sandbox ran and held ({report.probe_s * 1000:.0f} ms)")
        how = f"jail by [bold]{report.jail}[/], limits by [bold]{escape(report.backend)}[/]"
        console.print(f"{how}; state in {escape(report.state_dir)}")
    else:
        console.print("[bold red]does not isolate[/]: nothing will run here unsandboxed")
        console.print(escape(report.failure or "a check inside the sandbox failed, see below"))
        for found in report.capabilities:
            if found.required and not found.ok:
                console.print(f"[red]{escape(found.name)}[/]: {escape(found.detail)}")
                console.print(f"  [yellow]remedy:[/] {escape(found.remedy)}")
    rows = [
        ("limits", [(limit.name, limit.enforced, limit.how, limit.remedy) for limit in report.limits]),
        ("seen from inside", [(check.name, check.ok, check.detail, check.remedy) for check in report.checks]),
        ("this host", [(found.name, found.ok, found.detail, found.remedy) for found in report.capabilities]),
    ]
    for title, entries in rows:
        if not entries:
            continue
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for _ in range(3):
            table.add_column(overflow="fold")
        for name, ok, detail, remedy in entries:
            mark = "[green]yes[/]" if ok else "[red]no[/]"
            text = escape(detail) + (f"\n[yellow]remedy:[/] {escape(remedy)}" if remedy else "")
            table.add_row(escape(name), mark, text)
        console.print()
        console.print(table)
