"""The table of the package: every complaint and probe is listed, once, with a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
COMPLAINTS = [*range(1, 37, 2), 36, 37]
PROBES = [1, 3, 5, 7, 11, 13, 15, 17, 19, 21, 25, 27, 29]
ROW = re.compile(r"^    ([CP])(\d+) +\S.*? +(test_\w+)\.(test_\w+)$", re.MULTILINE)


def rows() -> list[tuple[str, int, str, str]]:
    text = ast.get_docstring(ast.parse((FOLDER / "__init__.py").read_text()), clean=False) or ""
    return [(kind, int(number), module, test) for kind, number, module, test in ROW.findall(text)]


def test_every_complaint_and_every_probe_is_listed_once() -> None:
    listed = [(kind, number) for kind, number, _, _ in rows()]
    assert listed == [("C", number) for number in sorted(COMPLAINTS)] + [("P", number) for number in PROBES]


def test_every_test_that_is_named_exists() -> None:
    for _, _, module, test in rows():
        tree = ast.parse((FOLDER / f"{module}.py").read_text())
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert test in [function.name for function in functions], f"{module}.{test}"
