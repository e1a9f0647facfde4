"""`rollout verify`, as its user meets it."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from rollout.cli import verify
from rollout.errors import ConfigError
from rollout.tasks.load import load_tasks, write_tasks


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    verify.add_parser(parser.add_subparsers())
    return verify.run(parser.parse_args(["verify", *words]))


def test_the_report_counts_and_has_a_row_for_each_submission(state_dir: Path, capsys: Any) -> None:
    state = ("--state-dir", str(state_dir))
    assert run("demo:heldout:6", *state, "--json", "--limit", "5", "--jobs", "3") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"]["passed"] == report["counts"]["submissions"] == 5
    assert [row["task_id"] for row in report["rows"]] == [task.id for task in load_tasks("demo:heldout:5")]
    assert all(row["hidden"]["num_tests"] == 7 for row in report["rows"])

    assert run("demo:heldout:2", *state, "--solutions", "noop", "--json") == 0
    assert json.loads(capsys.readouterr().out)["counts"]["failed"] == 2
    assert run("demo:heldout:2", *state, "--solutions", "wrong") == 0
    shown = capsys.readouterr().out
    assert "reward 1" in shown
    assert "2 tasks" in shown


def test_solutions_come_from_a_file_and_completions_continue_the_prompt(
    state_dir: Path, tmp_path: Path, capsys: Any
) -> None:
    row = {
        "task_id": "HumanEval/x",
        "prompt": "import math\n\ndef f(x):\n    '''Root.'''\n",
        "entry_point": "f",
        "canonical_solution": "    return math.sqrt(x)\n",
        "test": "def check(candidate):\n    assert candidate(4) == 2\n",
    }
    tasks, solutions = tmp_path / "tasks.jsonl", tmp_path / "solutions.jsonl"
    tasks.write_text(json.dumps(row))
    answers = [
        {"task_id": "HumanEval/x", "completion": row["canonical_solution"]},
        {"task_id": "HumanEval/x", "solution": "def f(x):\n    return x ** 0.5\n"},
        {"task_id": "HumanEval/x", "code": "def f(x):\n    return x\n"},
        {"task_id": "another", "code": ""},
    ]
    solutions.write_text("\n".join(map(json.dumps, answers)))
    arguments = ("--solutions", str(solutions), "--state-dir", str(state_dir), "--json")
    assert run(f"humaneval:{tasks}", *arguments) == 0
    captured = capsys.readouterr()
    assert [row["reward"] for row in json.loads(captured.out)["rows"]] == [1.0, 1.0, 0.0]
    assert "note: 1 rows" in captured.err


def test_a_verdict_that_could_not_be_reached_is_status_1(state_dir: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "broken.jsonl"
    row = {
        "id": "broken/tests",
        "prompt": "",
        "entry_points": ["f"],
        "oracle": "def f(): pass",
        "hidden_tests": {"type": "code", "setup": "import nowhere", "snippets": ["f()"]},
    }
    path.write_text(json.dumps(row))
    assert run(str(path), "--state-dir", str(state_dir)) == 1
    assert "No module named 'nowhere'" in capsys.readouterr().out


def test_mistakes_are_named_before_anything_starts(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", load_tasks("demo:train:2"))
    tasks = str(tmp_path / "tasks.jsonl")
    (tmp_path / "empty.jsonl").write_text('{"task_id": "other", "code": ""}\n')
    (tmp_path / "typo.jsonl").write_text(json.dumps({"task_id": load_tasks(tasks)[0].id, "solutoin": ""}))
    for words, message in (
        ((tasks, "--jobs", "0"), "--jobs = 0: must be at least 1"),
        ((tasks, "--timeout", "-1"), "--timeout = -1.0"),
        ((tasks, "--solutions", "nowhere"), "is neither oracle, noop, wrong nor a file"),
        ((tasks, "--solutions", str(tmp_path / "empty.jsonl")), "none of its 1 rows"),
        ((tasks, "--solutions", str(tmp_path / "typo.jsonl")), "typo.jsonl:1: solution = None: this field is missing"),
        ((str(tmp_path / "nowhere.jsonl"),), "no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(*words)


def test_the_first_command_on_a_host_builds_the_toolchain_image(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    state_dir = Path(tempfile.mkdtemp(prefix="rollout-no-image-"))
    request.addfinalizer(lambda: shutil.rmtree(state_dir))
    state_dir.chmod(0o755)
    assert run("demo:train:2", "--state-dir", str(state_dir)) == 0
    assert "image python: copying Python" in capsys.readouterr().err
