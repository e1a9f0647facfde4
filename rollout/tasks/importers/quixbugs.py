"""QuixBugs rows: a program with one wrong line, its correction, and test cases in JSON.

Where the row's own test compares the result with the case's expectation and nothing more, the cases become plain
`CaseTests`; where it does more (tuples, tolerances), that test itself is run by the judge. Programs on graphs have
no JSON cases and pass live objects: they are `Unsupported`.
"""

from __future__ import annotations

import ast

import orjson

from rollout.tasks.importers import Unsupported
from rollout.tasks.rows import Row
from rollout.tasks.types import Case, CaseTests, CodeTests, Task, TaskLimits, Tests

FAMILY = "quixbugs"
NUM_VISIBLE = 3
_PROMPT = """The Python function `{name}` below has a bug on one line.
Reply with the whole corrected function in one code block.
```python
{program}
```"""

_HARNESS = '''
import json, sys, types

class _Skipped(Exception):
    """A case that the test's author leaves out."""

def _skip(*_):
    raise _Skipped

class _Approximately:
    def __init__(self, expected, rel=None, abs=None):
        self.expected, self.rel, self.abs = expected, rel, abs
    def __eq__(self, actual):
        bounds = [self.abs] if self.abs is not None else []
        if self.rel is not None or not bounds:
            bounds.append((self.rel or 1e-6) * abs(self.expected))
        return abs(actual - self.expected) <= max(*bounds, 1e-12)

_cases = {}

def _parametrize(_names, cases):
    def mark(test):
        _cases[0] = (test, list(cases))
        return test
    return mark

pytest = types.ModuleType("pytest")
pytest.use_correct, pytest.run_slow = True, False
pytest.skip, pytest.approx, pytest.mark = _skip, _Approximately, types.SimpleNamespace(parametrize=_parametrize)
load_testdata = types.ModuleType("load_testdata")
load_testdata.load_json_testcases = lambda _: [json.loads(line) for line in _JSON.split("\\n") if line.strip()]
_package = types.ModuleType("correct_python_programs")
_program = types.ModuleType("correct_python_programs." + _NAME)

def _late(*arguments):
    return globals()[_NAME](*arguments)

_late.__name__ = _NAME
setattr(_program, _NAME, _late)
sys.modules.update({m.__name__: m for m in (pytest, load_testdata, _package, _program)})
_own = {}
exec(_TEST, _own)

def _run(number):
    test, cases = _cases[0]
    try:
        test(*cases[number])
    except _Skipped:
        pass
'''


def import_row(row: Row) -> Task:
    """The task of one row; `Unsupported` for a program without JSON cases."""
    name, buggy, correct = row.get("name", str), row.get("buggy_program", str), row.get("correct_program", str)
    test = row.python("pytest_file")
    if row.fields.get("json_cases") is None:
        raise Unsupported(f"{FAMILY}/{name}: no JSON cases; its tests pass linked objects, not plain data")
    row.python("correct_program")
    visible, hidden = _tests(row, name, test)
    return Task(
        id=f"{FAMILY}/{name}",
        prompt=_PROMPT.format(name=name, program=buggy.strip("\n")),
        entry_points=(name,),
        visible_tests=visible,
        hidden_tests=hidden,
        oracle=correct.strip("\n") + "\n",
        known_wrong=(buggy.strip("\n") + "\n",),
        limits=TaskLimits(max_turns=2, verify_timeout_s=5.0),
        domain="debugging",
        metadata={"family": FAMILY},
    )


def _tests(row: Row, name: str, test: ast.Module) -> tuple[Tests, Tests]:
    cases = _json_cases(row)
    materialize = _compares(test, name)
    if materialize is None:
        return _code_tests(row, name, len(cases))
    skipped = _skipped(test)
    kept = [case for case in cases if case[0] not in skipped]
    made = tuple(Case(args=repr(arguments), expected=repr(expected)) for arguments, expected in kept)
    return (
        CaseTests(cases=made[:NUM_VISIBLE], materialize=materialize),
        CaseTests(cases=made, materialize=materialize),
    )


def _code_tests(row: Row, name: str, num_cases: int) -> tuple[Tests, Tests]:
    values = {"_NAME": name, "_JSON": row.get("json_cases", str), "_TEST": row.get("pytest_file", str)}
    setup = "".join(f"{key} = {value!r}\n" for key, value in values.items()) + _HARNESS
    snippets = tuple(f"_run({number})" for number in range(num_cases))
    return CodeTests(setup=setup, snippets=snippets[:NUM_VISIBLE]), CodeTests(setup=setup, snippets=snippets)


def _json_cases(row: Row) -> list[tuple[list[object], object]]:
    cases: list[tuple[list[object], object]] = []
    for number, line in enumerate(row.get("json_cases", str).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            arguments, expected = orjson.loads(line)
        except (orjson.JSONDecodeError, ValueError, TypeError) as error:
            raise row.error("json_cases", line, f"line {number} is no pair of arguments and result: {error}") from None
        cases.append((arguments if isinstance(arguments, list) else [arguments], expected))
    if not cases:
        raise row.error("json_cases", "", "holds no case")
    return cases


def _compares(test: ast.Module, name: str) -> bool | None:
    """Whether the test lists the result before comparing it; None when it does more than compare."""
    plain, listed = f"{name}(*input_data) == expected", f"list({name}(*input_data)) == expected"
    asserted = {ast.unparse(node.test) for node in ast.walk(test) if isinstance(node, ast.Assert)}
    assigned = [ast.unparse(node) for node in ast.walk(test) if isinstance(node, (ast.Assign, ast.AugAssign))]
    functions = [node for node in test.body if isinstance(node, ast.FunctionDef)]
    decorators = [ast.unparse(decorator) for function in functions for decorator in function.decorator_list]
    branches = sum(isinstance(node, ast.If) for function in functions for node in ast.walk(function))
    usual = (
        assigned == [f"testdata = load_json_testcases({name}.__name__)"]
        and decorators == ["pytest.mark.parametrize('input_data,expected', testdata)"]
        and asserted in ({plain}, {listed})
        and branches == len(_skipped(test))
    )
    return asserted == {listed} if usual else None


def _skipped(test: ast.Module) -> list[object]:
    """Arguments of the cases that the test skips: `if input_data == [...]: pytest.skip(...)`."""
    skipped: list[object] = []
    for node in ast.walk(test):
        match node:
            case ast.If(
                test=ast.Compare(left=ast.Name(id="input_data"), ops=[ast.Eq()], comparators=[value]),
                body=[ast.Expr(value=ast.Call(func=ast.Attribute(attr="skip")))],
            ):
                skipped.append(ast.literal_eval(value))
    return skipped
