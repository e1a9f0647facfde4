"""Loads task sets by name, and reads and writes the project's own JSONL rows.

    humaneval:PATH   mbppplus:PATH   quixbugs:PATH     sets in their authors' format, .jsonl or .jsonl.gz
    demo:SPLIT[:N[:SEED]]                              the generated demo family (`train` or `heldout`)
    PATH.jsonl, PATH.jsonl.gz                          rows of the `Task` struct

Invariant: what is returned is sound: ids are unique, every task has tests and entry points, every literal parses.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollout.errors import ConfigError
from rollout.tasks.demo import DemoFamily
from rollout.tasks.demo.family import NUM_HELDOUT
from rollout.tasks.importers import Unsupported, humaneval, mbppplus, quixbugs
from rollout.tasks.literals import parsed
from rollout.tasks.program import PLACEHOLDER
from rollout.tasks.rows import Row, read_rows
from rollout.tasks.types import CaseTests, Task

_IMPORTERS: dict[str, Callable[[Row], Task]] = {
    "humaneval": humaneval.import_row,
    "mbppplus": mbppplus.import_row,
    "quixbugs": quixbugs.import_row,
}
DEMO_TASKS = 300
_MAX_DEMO_TASKS = {"train": 100_000, "heldout": NUM_HELDOUT}
"""What the family holds, about."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A task set, and the rows that were left out of it."""

    tasks: list[Task]
    skipped: list[str]
    """One line for each unsupported row: which, where and why."""


def load_tasks(spec: str) -> list[Task]:
    """The tasks of `spec` (see the module); ConfigError names file, line and field of what is wrong."""
    return load_with_report(spec, skip_unsupported=False).tasks


def load_with_report(spec: str, *, skip_unsupported: bool) -> Loaded:
    """The tasks of `spec`, and which sound rows cannot become tasks here.

    Args:
        skip_unsupported: leave those rows out; else the first one is a ConfigError. Wrong rows always are.
    """
    kind, colon, rest = spec.partition(":")
    if kind == "demo" and colon:
        return Loaded(_demo(spec, rest), [])
    importer = _IMPORTERS.get(kind) if colon else None
    path = Path(rest if importer else spec)
    if not os.path.isfile(path):  # false, too, for what cannot be a path
        known = ", ".join(f"{name}:PATH" for name in _IMPORTERS)
        raise ConfigError(
            "tasks", spec, f"no such file; task sets are PATH.jsonl[.gz], {known} or demo:SPLIT[:N[:SEED]]"
        )
    return _checked(path, importer or _task_row, skip_unsupported)


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Writes rows that `load_tasks` reads, gzipped where the name ends in `.gz`."""
    data = b"".join(msgspec.json.encode(task) + b"\n" for task in tasks)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _demo(spec: str, rest: str) -> list[Task]:
    split, *numbers = rest.split(":")
    sound = all(re.fullmatch("[0-9]{1,18}", number) for number in numbers)
    if split not in _MAX_DEMO_TASKS or len(numbers) > 2 or not sound:
        raise ConfigError("tasks", spec, "must be demo:SPLIT[:N[:SEED]], SPLIT train or heldout")
    count, seed = [*map(int, numbers), *(DEMO_TASKS, 0)[len(numbers) :]]
    if not 1 <= count <= _MAX_DEMO_TASKS[split]:
        raise ConfigError("tasks", spec, f"N must lie between 1 and {_MAX_DEMO_TASKS[split]} for {split}")
    return DemoFamily(seed).tasks(split, count)


def _task_row(row: Row) -> Task:
    try:
        return msgspec.convert(row.fields, Task)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{row.path}:{row.line}", row.fields.get("id"), str(error)) from None


def _checked(path: Path, importer: Callable[[Row], Task], skip_unsupported: bool) -> Loaded:
    tasks: dict[str, Task] = {}
    skipped: list[str] = []
    for row in read_rows(path):
        try:
            task = importer(row)
        except Unsupported as error:
            if not skip_unsupported:
                raise row.error("tests", "unsupported", f"{error} (--skip-unsupported leaves it out)") from None
            skipped.append(f"{path}:{row.line}: {error}")
            continue
        if task.id in tasks:
            raise row.error("id", task.id, "occurs twice")
        for field, remedy in _faults(task):
            raise row.error(field, task.id, remedy)
        tasks[task.id] = task
    if not tasks:
        raise ConfigError("tasks", str(path), "holds no task" + (f" ({len(skipped)} unsupported)" if skipped else ""))
    return Loaded(list(tasks.values()), skipped)


def _faults(task: Task) -> Iterator[tuple[str, str]]:
    """Fields of a well-typed task that cannot be judged, and what they must be."""
    if task.visible_tests is None and task.hidden_tests is None:
        yield "hidden_tests", "a task needs hidden or visible tests"
    if not task.entry_points:
        yield "entry_points", "a function-style task needs at least one"
    if task.wrapper and task.wrapper.count(PLACEHOLDER) != 1:
        yield "wrapper", f"must hold {PLACEHOLDER} exactly once"
    for field, tests in (("visible_tests", task.visible_tests), ("hidden_tests", task.hidden_tests)):
        if tests is not None and not (tests.cases if isinstance(tests, CaseTests) else tests.snippets):
            yield field, "must hold at least one test"
        if isinstance(tests, CaseTests):
            try:
                parsed(tests)
            except ValueError as error:
                yield field, str(error)
