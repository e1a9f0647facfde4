"""`rollout verify`: grades existing solutions of a task set, each in fresh sandboxes.

Owns: the meaning of its flags and of its exit status. Invariant: one row for every submission that was asked for, in
the order of the task set; what could not be judged is counted as invalid and never as failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.flags import at_least, named_by_flags
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from rollout.tasks.load import Loaded
    from rollout.tasks.types import Task
    from rollout.types import Verdict
    from rollout.verify.config import VerifierConfig

_SOURCES = ("oracle", "noop", "wrong")
_MAX_LISTED = 20
_EPILOG = """task sets:
  humaneval:PATH   mbppplus:PATH   quixbugs:PATH   .jsonl or .jsonl.gz in their authors' format
  demo:SPLIT[:N[:SEED]]                            the generated demo family, SPLIT train or heldout
  PATH.jsonl                                       rows of this project's own tasks

solutions:
  oracle (the set's own), noop (an empty program), wrong (the set's known wrong programs), or a JSONL file with
  rows {task_id, solution | code | completion}; a completion continues the task's prompt.

exit status: 0 whatever was passed, 1 when a verdict could not be reached, 2 when what was asked for is wrong.
"""


@dataclass(frozen=True, slots=True)
class Submission:
    """One program to grade."""

    task: Task
    program: str
    label: str
    """Which of the task's submissions it is: its number in the file or the list."""


def add_parser(subparsers: Any) -> None:
    """Declare the flags."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        help="grade existing solutions of a task set",
        description="Grade solutions of a task set by its visible and hidden tests, each in fresh sandboxes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tasks", metavar="TASKS", help="the task set (see below)")
    parser.add_argument("--solutions", default="oracle", metavar="WHAT", help="oracle, noop, wrong or FILE.jsonl")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N tasks")
    parser.add_argument("--jobs", type=int, metavar="N", help="verdicts at once (default: twice the CPUs)")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds for one test set (default: the task's own)")
    parser.add_argument("--skip-unsupported", action="store_true", help="leave out rows that cannot become tasks here")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where images and engines' records live")
    parser.add_argument("--json", action="store_true", help="print one JSON object: counts, and a row per submission")


def run(arguments: argparse.Namespace) -> int:
    """Grades, reports, and returns the exit status."""

    from rollout.cli.output import print_json
    from rollout.cli.toolchain import ensure_toolchain
    from rollout.tasks.load import load_with_report
    from sandbox.loop import run_on_loop

    config = _checked(arguments)
    loaded = load_with_report(arguments.tasks, skip_unsupported=arguments.skip_unsupported)
    tasks = [_with_timeout(task, arguments.timeout) for task in loaded.tasks[: arguments.limit]]
    submissions = _submissions(tasks, arguments.solutions)
    ensure_toolchain(arguments.state_dir)
    started_s = time.monotonic()
    try:
        verdicts = run_on_loop(_grade, submissions, config, arguments.state_dir)
    except BaseExceptionGroup as group:
        raise _first(group) from group
    wall_s = time.monotonic() - started_s
    rows = [_row(submission, verdict) for submission, verdict in zip(submissions, verdicts, strict=True)]
    counts = _counts(rows)
    if arguments.json:
        report = {"tasks": arguments.tasks, "solutions": arguments.solutions, "wall_s": round(wall_s, 3)}
        print_json({**report, "jobs": config.concurrency, "counts": counts, "skipped": loaded.skipped, "rows": rows})
    else:
        _print_report(arguments, loaded, rows, counts, wall_s)
    return 1 if counts["invalid"] else 0


def _checked(arguments: argparse.Namespace) -> VerifierConfig:
    """How to verify; every flag is checked before anything is read."""
    from rollout.verify.config import VerifierConfig

    at_least("--limit", arguments.limit, 1)
    at_least("--jobs", arguments.jobs, 1)
    if arguments.timeout is not None and not 0 < arguments.timeout <= 3600:
        raise ConfigError("--timeout", arguments.timeout, "must lie in (0, 3600] seconds")
    if arguments.solutions not in _SOURCES and not os.path.isfile(arguments.solutions):
        raise ConfigError("--solutions", arguments.solutions, f"is neither {', '.join(_SOURCES)} nor a file")
    with named_by_flags({"verify.concurrency": "--jobs"}):
        return VerifierConfig(concurrency=arguments.jobs or 2 * (os.cpu_count() or 1))


def _with_timeout(task: Task, timeout_s: float | None) -> Task:
    import msgspec

    if timeout_s is None:
        return task
    limits = msgspec.structs.replace(task.limits, verify_timeout_s=timeout_s)
    return msgspec.structs.replace(task, limits=limits)


def _submissions(tasks: list[Task], source: str) -> list[Submission]:
    if source not in _SOURCES:
        try:
            return list(_from_file(Path(source), tasks))
        except ConfigError as error:
            if error.field == "--solutions":
                raise
            raise ConfigError(f"--solutions: {error.field}", error.value, error.remedy) from None
    submissions = [submission for task in tasks for submission in _own_submissions(task, source)]
    without = len(tasks) - len({submission.task.id for submission in submissions})
    if without:
        kind = {"oracle": "solution", "wrong": "known wrong program"}[source]
        print(f"note: {without} of {len(tasks)} tasks have no {kind} of their own", file=sys.stderr)
    return submissions


def _own_submissions(task: Task, source: str) -> Iterator[Submission]:
    if source == "noop":
        yield Submission(task, "", "0")
    elif source == "oracle":
        if task.oracle is not None:
            yield Submission(task, task.oracle, "0")
    else:
        for i, program in enumerate(task.known_wrong):
            yield Submission(task, program, str(i))


def _from_file(path: Path, tasks: list[Task]) -> Iterator[Submission]:
    from rollout.tasks.rows import read_rows

    by_id = {task.id: task for task in tasks}
    seen: Counter[str] = Counter()
    unknown = 0
    for row in read_rows(path, "--solutions"):
        task = by_id.get(row.get("task_id", str))
        if task is None:
            unknown += 1
            continue
        field = next((name for name in ("solution", "code", "completion") if name in row.fields), "solution")
        text = row.get(field, str)
        prefix = task.metadata.get("completion_prefix", "") if field == "completion" else ""
        yield Submission(task, prefix + text, str(seen[task.id]))
        seen[task.id] += 1
    if not seen:
        raise ConfigError("--solutions", str(path), f"none of its {unknown} rows is for a task of the set")
    if unknown:
        print(f"note: {unknown} rows of {path} are for no task of the set", file=sys.stderr)


async def _grade(submissions: list[Submission], config: VerifierConfig, state_dir: Path | None) -> list[Verdict]:
    """Verdicts in the order of `submissions`, `config.concurrency` at once; progress goes to stderr."""
    import anyio
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from rollout.verify.verifier import Verifier
    from sandbox.host import SandboxConfig, SandboxHost
    from sandbox.pool.pool import SandboxPool

    verdicts: list[Verdict | None] = [None] * len(submissions)
    remaining = iter(range(len(submissions)))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("verifying", total=len(submissions))
        passed = 0

        async def work() -> None:
            nonlocal passed
            for i in remaining:
                verdict = await verifier.verify(submissions[i].task, submissions[i].program)
                verdicts[i] = verdict
                passed += _reward(verdict) == 1.0
                progress.update(bar, advance=1, description=f"verifying ({passed} passed)")

        async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir) if state_dir else None)) as host:
            async with (
                SandboxPool.start(host) as pool,
                Verifier(pool, config) as verifier,
                anyio.create_task_group() as group,
            ):
                for _ in range(config.concurrency):
                    group.start_soon(work)
    return [verdict for verdict in verdicts if verdict is not None]


def _first(error: BaseException) -> BaseException:
    """The first exception in a group of them: workers that fail together fail for the same reason."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _reward(verdict: Verdict) -> float | None:
    """The reward, or None for an invalid verdict."""
    from rollout.types import Reward

    return verdict.reward.value if isinstance(verdict.reward, Reward) else None


def _row(submission: Submission, verdict: Verdict) -> dict[str, Any]:
    from rollout.types import Invalid

    row: dict[str, Any] = {
        "task_id": submission.task.id,
        "submission": submission.label,
        "reward": _reward(verdict),
        "invalid": verdict.reward.reason if isinstance(verdict.reward, Invalid) else None,
    }
    for layer in verdict.layers:
        row[layer.layer] = {
            "passed": layer.passed,
            "num_passed": layer.num_passed,
            "num_tests": layer.num_tests,
            "evidence": layer.evidence,
            "wall_s": round(layer.wall_s, 4),
        }
    return row


def _counts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def passed(layer: str) -> int:
        return sum(bool(row.get(layer, {}).get("passed")) for row in rows)

    return {
        "tasks": len({row["task_id"] for row in rows}),
        "submissions": len(rows),
        "passed": sum(row["reward"] == 1.0 for row in rows),
        "failed": sum(row["reward"] is not None and row["reward"] < 1.0 for row in rows),
        "invalid": sum(row["reward"] is None for row in rows),
        "visible_passed": passed("visible"),
        "visible_tested": sum("visible" in row for row in rows),
        "hidden_passed": passed("hidden"),
        "hidden_tested": sum("hidden" in row for row in rows),
    }


def _print_report(
    arguments: argparse.Namespace, loaded: Loaded, rows: list[dict[str, Any]], counts: dict[str, Any], wall_s: float
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.print(escape(f"{arguments.tasks}, {arguments.solutions}:"), soft_wrap=True)
    table = Table()
    for heading in ("", "passed", "of"):
        table.add_column(heading, justify="left" if not heading else "right")
    for layer in ("visible", "hidden"):
        if counts[f"{layer}_tested"]:
            table.add_row(f"{layer} tests", str(counts[f"{layer}_passed"]), str(counts[f"{layer}_tested"]))
    table.add_row("reward 1", str(counts["passed"]), str(counts["submissions"]), style="bold")
    if counts["invalid"]:
        table.add_row("invalid (a fault of ours)", str(counts["invalid"]), str(counts["submissions"]), style="red")
    console.print(table)
    console.print(f"{counts['tasks']} tasks, {counts['submissions']} submissions in {wall_s:.1f} s")
    _print_rows(console.print, arguments.solutions, rows)
    for line in loaded.skipped:
        console.print(escape(f"skipped {line}"), soft_wrap=True)


def _print_rows(show: Callable[..., None], source: str, rows: list[dict[str, Any]]) -> None:
    """The rows that a reader wants to see: what contradicts the source of the solutions, and what was invalid."""
    from rich.markup import escape

    surprising = [row for row in rows if row["invalid"] or (row["reward"] == 1.0) == (source in ("noop", "wrong"))]
    listed = surprising if source in _SOURCES else [row for row in rows if row["invalid"]]
    for row in listed[:_MAX_LISTED]:
        layers = (row[name] for name in ("hidden", "visible") if name in row)
        evidence = next((layer["evidence"] for layer in layers if layer["evidence"]), "")
        first_line = (row["invalid"] or evidence or "passed").strip().splitlines()[0]
        show(escape(f"  {row['task_id']}[{row['submission']}] reward {row['reward']}: {first_line[:160]}"))
    if len(listed) > _MAX_LISTED:
        show(f"  … and {len(listed) - _MAX_LISTED} more (--json lists all)")
