"""Loading of task sets: the project's own rows, other people's, and what is wrong with them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.tasks.literals import parse, render
from rollout.tasks.load import load_tasks, load_with_report, write_tasks
from rollout.tasks.program import program_of
from rollout.tasks.submission import extract_submission
from rollout.tasks.types import CaseTests, CodeTests

HUMANEVAL: dict[str, Any] = {
    "task_id": "HumanEval/0",
    "prompt": "import math\n\ndef helper(x):\n    return x\n\ndef f(x):\n    '''Doubles.'''\n",
    "entry_point": "f",
    "canonical_solution": "    return 2 * helper(x)\n",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
}
MBPP: dict[str, Any] = {
    "task_id": 2,
    "code": "\ndef inner(x):\n  return x\ndef f(x):\n  return inner(x)\n",
    "prompt": "Write f.",
    "test_imports": ["import math"],
    "test_list": ["assert f(1) == 1", "assert f(2) == 2"],
    "test": "for i in range(9):\n    assert f(i) == i\n",
}
PYTEST_FILE = """import pytest
from load_testdata import load_json_testcases
if pytest.use_correct:
    from correct_python_programs.f import f
else:
    from python_programs.f import f
testdata = load_json_testcases(f.__name__)
@pytest.mark.parametrize("input_data,expected", testdata)
def test_f(input_data, expected):
    assert f(*input_data) == expected
"""
QUIXBUGS: dict[str, Any] = {
    "name": "f",
    "buggy_program": "\ndef f(x):\n    return x + 2\n",
    "correct_program": "\ndef f(x):\n    return x + 1\n",
    "pytest_file": PYTEST_FILE,
    "json_cases": "[[1], 2]\n[[2], 3]\n[[3], 4]\n[[4], 5]\n",
}


def written(folder: Path, *rows: object, name: str = "rows.jsonl") -> str:
    path = folder / name
    data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def test_humaneval_rows_become_whole_functions_with_a_trusted_prefix(tmp_path: Path) -> None:
    (task,) = load_tasks("humaneval:" + written(tmp_path, HUMANEVAL))
    assert task.prefix == "import math\n\ndef helper(x):\n    return x\n\n"
    assert task.oracle == "def f(x):\n    '''Doubles.'''\n    return 2 * helper(x)\n"
    assert task.entry_points == ("f",)
    assert isinstance(task.hidden_tests, CodeTests)
    compile(task.hidden_tests.setup, "setup", "exec")
    namespace: dict[str, Any] = {}
    exec(program_of(task, task.oracle), namespace)
    assert namespace["f"](2) == 4


def test_mbpp_entry_points_are_what_the_reference_defines_and_the_tests_call(tmp_path: Path) -> None:
    (task,) = load_tasks("mbppplus:" + written(tmp_path, MBPP, name="rows.jsonl.gz"))
    assert task.entry_points == ("f",)
    assert task.prompt == "Write f.\nYour code must pass this test:\nassert f(1) == 1"
    assert isinstance(task.visible_tests, CodeTests)
    assert task.visible_tests.snippets == ("assert f(1) == 1", "assert f(2) == 2")


def test_quixbugs_rows_that_only_compare_become_cases(tmp_path: Path) -> None:
    (task,) = load_tasks("quixbugs:" + written(tmp_path, QUIXBUGS))
    assert isinstance(task.visible_tests, CaseTests)
    assert isinstance(task.hidden_tests, CaseTests)
    assert (len(task.visible_tests.cases), len(task.hidden_tests.cases)) == (3, 4)
    assert not task.hidden_tests.materialize
    assert task.known_wrong == ("def f(x):\n    return x + 2\n",)
    assert "return x + 2" in task.prompt
    assert "return x + 1" not in task.prompt


def test_quixbugs_generators_are_listed_and_slow_cases_left_out(tmp_path: Path) -> None:
    listed = PYTEST_FILE.replace("f(*input_data) ==", "list(f(*input_data)) ==")
    skipping = PYTEST_FILE.replace("    assert", "    if input_data == [3]:\n        pytest.skip('slow')\n    assert")
    for text, materialize, count in ((listed, True, 4), (skipping, False, 3)):
        (task,) = load_tasks("quixbugs:" + written(tmp_path, {**QUIXBUGS, "pytest_file": text}))
        assert isinstance(task.hidden_tests, CaseTests)
        assert (task.hidden_tests.materialize, len(task.hidden_tests.cases)) == (materialize, count)


@pytest.mark.parametrize(
    ("change", "replacement"),
    [
        ("testdata)\n\n", "testdata)\n\n"),
        ("== expected", "== pytest.approx(expected, abs=1)"),
        ("    assert", "    if input_data[0] > 3:\n        pytest.skip('slow')\n    assert"),
        ("@pytest", "testdata = [[i, o] for i, o in testdata]\n@pytest"),
    ],
)
def test_quixbugs_tests_that_do_more_are_run_by_the_judge(tmp_path: Path, change: str, replacement: str) -> None:
    text = PYTEST_FILE.replace(change, replacement)
    (task,) = load_tasks("quixbugs:" + written(tmp_path, {**QUIXBUGS, "pytest_file": text}))
    assert isinstance(task.hidden_tests, CodeTests) == (text != PYTEST_FILE)


def test_unsupported_rows_are_named_and_left_out_only_on_request(tmp_path: Path) -> None:
    spec = "quixbugs:" + written(tmp_path, QUIXBUGS, {**QUIXBUGS, "name": "graph", "json_cases": None})
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: .*quixbugs/graph: no JSON cases"):
        load_tasks(spec)
    loaded = load_with_report(spec, skip_unsupported=True)
    assert [task.id for task in loaded.tasks] == ["quixbugs/f"]
    assert "rows.jsonl:2" in loaded.skipped[0]


BAD_ROWS = [
    ("humaneval", HUMANEVAL, {"prompt": None}, "prompt = None: must be of type str, not NoneType"),
    ("humaneval", HUMANEVAL, {"prompt": "def f(:"}, "prompt = .*is no Python"),
    ("humaneval", HUMANEVAL, {"entry_point": "g"}, "entry_point = 'g': is not defined in the prompt"),
    ("mbppplus", MBPP, {"task_id": "two"}, "task_id = 'two': must be of type int"),
    ("mbppplus", MBPP, {"task_id": True}, "task_id = True: must be of type int"),
    ("mbppplus", MBPP, {"test_list": []}, "test_list = .*at least one"),
    ("mbppplus", MBPP, {"test_list": ["assert g(1)"]}, "test_list = .*calls no function"),
    ("mbppplus", MBPP, {"test_imports": [1]}, "test_imports = .*list of strings"),
    ("quixbugs", QUIXBUGS, {"json_cases": "[1"}, "json_cases = .*line 1 is no pair"),
    ("quixbugs", QUIXBUGS, {"json_cases": "\n"}, "json_cases = .*holds no case"),
    ("quixbugs", QUIXBUGS, {"correct_program": "def f(:"}, "correct_program = .*is no Python"),
]


@pytest.mark.parametrize(("kind", "row", "change", "message"), BAD_ROWS)
def test_a_bad_row_is_refused_with_its_file_line_and_field(
    tmp_path: Path, kind: str, row: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, row, "", {**row, **change}).replace('""\n', "")
    Path(path).write_text("\n".join(["", json.dumps(row), json.dumps({**row, **change})]))
    with pytest.raises(ConfigError, match=rf"rows\.jsonl:3: {message}"):
        load_tasks(f"{kind}:{path}")


def test_a_missing_field_broken_json_and_double_ids_are_named(tmp_path: Path) -> None:
    row = {key: value for key, value in HUMANEVAL.items() if key != "test"}
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: test = None: this field is missing"):
        load_tasks("humaneval:" + written(tmp_path, row))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2 = .*is no JSON"):
        load_tasks("humaneval:" + written(tmp_path, HUMANEVAL, b"{oops"))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1 = .*must be a JSON object"):
        load_tasks("humaneval:" + written(tmp_path, [1]))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: id = 'HumanEval/0': occurs twice"):
        load_tasks("humaneval:" + written(tmp_path, HUMANEVAL, HUMANEVAL))


def test_our_own_rows_are_written_and_read_back(tmp_path: Path) -> None:
    tasks = load_tasks("demo:train:20:3") + load_tasks("quixbugs:" + written(tmp_path, QUIXBUGS))
    for name in ("own.jsonl", "own.jsonl.gz"):
        write_tasks(tmp_path / name, tasks)
        assert load_tasks(str(tmp_path / name)) == tasks


def test_our_own_rows_are_checked_field_by_field(tmp_path: Path) -> None:
    base = {"id": "a/b", "prompt": "", "entry_points": ["f"]}
    case = {"args": "[1]", "expected": "2"}

    def cases(*rows: dict[str, str]) -> dict[str, object]:
        return {"type": "cases", "cases": rows}

    for change, message in (
        ({"promt": ""}, "unknown field `promt`"),
        ({}, "hidden_tests = 'a/b': a task needs hidden or visible tests"),
        ({"hidden_tests": cases()}, "hidden_tests = 'a/b': must hold at least one test"),
        ({"hidden_tests": cases({**case, "args": "f(1)"})}, "hidden_tests = .*not a Python literal"),
        ({"hidden_tests": cases({**case, "args": "1"})}, "hidden_tests = .*are no list"),
        ({"hidden_tests": cases(case), "entry_points": []}, "entry_points = .*at least one"),
        ({"hidden_tests": cases(case), "wrapper": "x"}, "wrapper = .*exactly once"),
        ({"hidden_tests": {"type": "cases", "cases": 1}}, r"Expected `array`, got `int` - at `\$.hidden_tests.cases`"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tasks(written(tmp_path, {**base, **change}))


def test_specs_that_name_nothing_are_refused_with_what_could_be_meant(tmp_path: Path) -> None:
    for spec in ("nowhere.jsonl", "humaneval:nowhere", "swebench:x", "demo"):
        with pytest.raises(ConfigError, match="no such file; task sets are"):
            load_tasks(spec)
    for spec in ("demo:test", "demo:train:x", "demo:train:1:2:3"):
        with pytest.raises(ConfigError, match="must be demo:SPLIT"):
            load_tasks(spec)
    with pytest.raises(ConfigError, match="holds no task"):
        load_tasks(written(tmp_path))
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b"{}")[:-3])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tasks(str(tmp_path / "torn.jsonl.gz"))


def test_literals_are_written_and_read_back_and_nothing_else_is_read() -> None:
    inf = float("inf")
    for value in ([1, -2.5, inf, -inf, 1 + 2j, "x", b"y", None, True], {1: {2}, (3,): set()}, frozenset({1})):
        assert parse(render(value)) == value
    for text in ("f(1)", "x", "[1 for _ in y]", "1 + 'a'", "__import__('os')", "1 +", "{**a}", "[*a]"):
        with pytest.raises(ValueError, match="not a"):
            parse(text)


def test_the_program_is_the_first_block_or_all_of_the_text() -> None:
    assert extract_submission("Here:\n```python\nx = 1\n```\nor\n```\ny = 2\n```") == "x = 1\n"
    assert extract_submission("```\nx = 1\n```") == "x = 1\n"
    assert extract_submission("```python\nx = 1\ny =") == "x = 1\ny ="
    assert extract_submission("x = 1") == "x = 1"
    assert extract_submission(" \n") is None
    assert extract_submission("```python\n\n```") is None


def test_the_recorded_extraction_of_real_rollouts_is_reproduced_on_every_row(data_dir: Path) -> None:
    with gzip.open(data_dir / "smollm2-rollouts.jsonl.gz", "rt") as rows:
        recorded = [json.loads(row) for row in rows]
    assert len(recorded) == 400
    assert all(extract_submission(row["text"]) == row["code"] for row in recorded)


def test_every_row_of_the_real_sets_is_imported(data_dir: Path) -> None:
    assert len(load_tasks(f"humaneval:{data_dir}/humaneval.jsonl.gz")) == 164
    assert len(load_tasks(f"mbppplus:{data_dir}/mbppplus-half.jsonl.gz")) == 189
    loaded = load_with_report(f"quixbugs:{data_dir}/quixbugs-half.jsonl.gz", skip_unsupported=True)
    assert (len(loaded.tasks), len(loaded.skipped)) == (15, 5)
