"""MBPP+ rows: `test_list` holds a few visible assertions, `test` the many that decide.

Entry points are the functions that the reference defines and the visible assertions call.
"""

from __future__ import annotations

import ast

from rollout.tasks.rows import Row
from rollout.tasks.types import CodeTests, Task, TaskLimits

FAMILY = "mbppplus"
_SLOW_S = {599: 90.0}
"""Rows whose own reference needs most of ten seconds for its tests on an idle core (it sums up to 10^8 numbers)."""


def import_row(row: Row) -> Task:
    """The task of one row."""
    number, code = row.get("task_id", int), row.get("code", str)
    asserts, imports = row.texts("test_list"), row.texts("test_imports")
    if not asserts:
        raise row.error("test_list", asserts, "must hold at least one assertion")
    setup = "\n".join(imports)
    return Task(
        id=f"Mbpp/{number}",
        prompt=f"{row.get('prompt', str)}\nYour code must pass this test:\n{asserts[0]}",
        entry_points=_entry_points(row, code, asserts),
        visible_tests=CodeTests(setup=setup, snippets=tuple(asserts)),
        hidden_tests=CodeTests(setup=setup, snippets=(row.get("test", str),)),
        oracle=code.strip("\n") + "\n",
        limits=TaskLimits(verify_timeout_s=_SLOW_S.get(number, TaskLimits().verify_timeout_s)),
        metadata={"family": FAMILY},
    )


def _entry_points(row: Row, code: str, asserts: list[str]) -> tuple[str, ...]:
    defined = [node.name for node in row.python("code", code).body if isinstance(node, ast.FunctionDef)]
    called = {
        node.func.id
        for text in asserts
        for node in ast.walk(row.python("test_list", text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    names = tuple(name for name in dict.fromkeys(defined) if name in called)
    if not names:
        raise row.error("test_list", asserts[0], "calls no function that `code` defines")
    return names
