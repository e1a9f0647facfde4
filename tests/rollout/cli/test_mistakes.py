"""A user's own mistake is one line that names what was given, and status 2; never a traceback, never a default."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.cli import assembly
from rollout.cli.main import main
from rollout.errors import ConfigError
from rollout.sampler.recorded import RecordedScript
from rollout.tasks.load import Loaded, load_tasks

Mistake = Callable[..., str]
DAMAGED = gzip.compress(b'{"task_id": "a"}\n' * 99)[:14] + b"\xff" * 40
LONG = "a" * 5000


@pytest.fixture
def mistake(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mistake:
    """The line that a command ends with, having printed nothing else and made nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text('name = "small"\n')
    (tmp_path / "damaged.jsonl.gz").write_bytes(DAMAGED)
    (tmp_path / "broken.jsonl").write_text("{no json\n")

    def refused(*words: str) -> str:
        assert main(list(words)) == 2
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert captured.out == ""
        assert line.startswith("error: ")
        return str(line.removeprefix("error: "))

    return refused


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("train --resume small.toml", "--resume = 'small.toml': "),
        ("train --resume nowhere", "--resume = 'nowhere': "),
        ("train small.toml --run-dir small.toml", "--run-dir = 'small.toml': "),
        ("train small.toml --run-dir /dev/null", "--run-dir = '/dev/null': "),
        (f"train small.toml --run-dir {LONG}", "--run-dir = 'aaa"),
        ("eval demo:heldout:1 --sampler oracle --run-dir /dev/null", "--run-dir = '/dev/null': "),
        ("run demo:heldout:1 --sampler oracle --run-dir /dev/null/x", "--run-dir = '/dev/null/x': "),
        (f"eval demo:heldout:1 --sampler oracle --run-dir {LONG}", "--run-dir = 'aaa"),
        ("eval demo:heldout:1 --sampler oracle --max-tokens 0", "--max-tokens = 0: "),
        ("eval demo:heldout:1 --sampler oracle --max-context 0", "--max-context = 0: "),
        ("eval demo:heldout:1 --sampler oracle --episodes 0", "--episodes = 0: "),
        ("eval demo:heldout:1 --sampler oracle --max-turns 0", "--max-turns = 0: "),
        ("eval demo:heldout:1 --sampler oracle --jobs 100000", "--jobs = 100000: "),
        ("eval demo:heldout:1 --sampler oracle --request-timeout -1", "--request-timeout = -1.0: "),
        ("eval demo:heldout:1 --sampler oracle --temperature nan", "--temperature = nan: "),
        ("eval demo:heldout:1 --server nowhere", "--server = 'nowhere': "),
        ("eval demo:heldout:1 --sampler recorded:damaged.jsonl.gz", "--sampler = 'damaged.jsonl.gz': "),
        ("eval demo:heldout:1 --sampler recorded:/dev/zero", "--sampler = '/dev/zero': must be a regular file"),
        ("run demo:heldout:1 --sampler oracle --group-size 0", "--group-size = 0: "),
        ("verify damaged.jsonl.gz", "tasks = 'damaged.jsonl.gz': "),
        (f"verify {LONG}", "tasks = 'aaa"),
        ("verify demo:train:999999999", "tasks = 'demo:train:999999999': N must lie between 1 and 100000"),
        ("verify demo:heldout:301", "tasks = 'demo:heldout:301': N must lie between 1 and 300"),
        ("verify demo:train:0", "tasks = 'demo:train:0': N must lie between 1"),
        ("verify demo:train:²", "tasks = 'demo:train:²': must be demo:SPLIT"),
        ("verify nowhere.jsonl --jobs 100000", "--jobs = 100000: "),
        ("verify nowhere.jsonl --timeout 0", "--timeout = 0.0: "),
        ("verify nowhere.jsonl --solutions never", "--solutions = 'never': "),
        (f"verify nowhere.jsonl --solutions {LONG}", "--solutions = 'aaa"),
        ("verify demo:heldout:1 --solutions damaged.jsonl.gz", "--solutions = 'damaged.jsonl.gz': "),
        ("verify demo:heldout:1 --solutions broken.jsonl", "--solutions: broken.jsonl:1 = "),
        ("exec --insist x -- true", "--insist = 'x': must be one of memory"),
        ("exec --insist= -- true", "--insist = '': must be one of memory"),
        ("exec --insist memory, -- true", "--insist = 'memory,': must be one of memory"),
        ("census --state-dir nowhere", "--state-dir = 'nowhere': does not exist"),
        ("gc --state-dir small.toml/below", "--state-dir = 'small.toml/below': is not a directory"),
        ("gc --state-dir nowhere --json", "--state-dir = 'nowhere': does not exist"),
        ("exec --workspace-file /dev/zero -- true", "--workspace-file = '/dev/zero': must be a regular file"),
        ("exec --workspace-file /dev/null:. -- true", "--workspace-file = '/dev/null:.': "),
        (f"exec --workspace-file small.toml:{'n' * 300} -- true", "--workspace-file = "),
        (f"exec --workspace-file small.toml:{'n/' * 3000}x -- true", "--workspace-file = "),
        (f"exec --workspace-file {LONG} -- true", "--workspace-file = 'aaa"),
        ("exec --workspace-file small.toml:a --workspace-file small.toml:a/b -- true", "--workspace-file = "),
        ("exec --workspace-file small.toml:a --workspace-file small.toml:a -- true", "--workspace-file = "),
        (f"exec --state-dir {LONG} -- true", "--state-dir = "),
        ("exec --image nowhere -- true", "--image = 'nowhere': "),
        ("eval demo:heldout:1 --sampler nobody", "--sampler = 'nobody': "),
        ("eval demo:heldout:1 --sampler oracle --model-dir small.toml", "--model-dir = 'small.toml': "),
        (f"show {LONG}", f"{LONG}/journal: File name too long"),
        ("show small.toml", "RUN_DIR = 'small.toml': holds no journal"),
        ("show . --limit -1", "--limit = -1: "),
    ],
    ids=lambda value: value[:60] if " " in value or "=" in value else value[:40],
)
def test_a_mistake_is_one_line_that_names_it(mistake: Mistake, words: str, start: str) -> None:
    assert mistake(*words.split()).startswith(start)


@pytest.mark.parametrize("bad", ["bad\udcff", "\udcff.jsonl"])
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train", "demo", "--run-dir"], "--run-dir"),
        (["train", "--resume"], "--resume"),
        (["train"], "CONFIG"),
        (["eval", "demo:heldout:1", "--sampler"], "--sampler"),
        (["eval", "demo:heldout:1", "--sampler", "oracle", "--run-dir"], "--run-dir"),
        (["verify", "demo:heldout:1", "--solutions"], "--solutions"),
        (["verify", "demo:heldout:1", "--state-dir"], "--state-dir"),
        (["verify"], "TASKS"),
        (["exec", "--workspace-file"], "--workspace-file"),
        (["exec", "--image"], "--image"),
        (["image", "list", "--state-dir"], "--state-dir"),
        (["show"], "RUN_DIR"),
        (["gc", "--state-dir"], "--state-dir"),
    ],
)
def test_an_argument_that_is_no_utf8_is_refused(mistake: Mistake, words: list[str], name: str, bad: str) -> None:
    assert mistake(*words, bad) == f"{name} = {bad!r}: must be valid UTF-8"


@pytest.mark.parametrize("words", ["eval demo:heldout:1 --sampler oracle --run-dir", "gc --state-dir", "show"])
def test_an_empty_path_is_refused(mistake: Mistake, words: str) -> None:
    assert mistake(*words.split(), "").endswith(" = '': must name a path")


def test_a_state_directory_from_the_environment_must_be_utf8(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_STATE_DIR", f"{tmp_path}/\udcff")
    assert "must be valid UTF-8" in mistake("exec", "--", "true")


@pytest.mark.parametrize("command", ["census", "gc"])
def test_only_the_default_state_directory_may_be_missing(
    mistake: Mistake, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLOUT_STATE_DIR", "nowhere")
    assert mistake(command).startswith("ROLLOUT_STATE_DIR = 'nowhere': does not exist")
    monkeypatch.delenv("ROLLOUT_STATE_DIR")
    monkeypatch.setattr("sandbox.estate.state.default_state_dir", lambda: tmp_path / "absent")
    main([command])  # whatever others have left on this host
    assert f"{tmp_path}/absent does not exist" in capsys.readouterr().out
    assert not (tmp_path / "absent").exists()


def test_a_workspace_file_is_no_pipe_and_no_longer_than_its_cap(mistake: Mistake, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "must be a regular file" in mistake("exec", "--workspace-file", "pipe", "--", "true")
    with open(tmp_path / "huge", "wb") as file:
        file.truncate((256 << 20) + 1)
    assert "is longer than" in mistake("exec", "--workspace-file", "huge", "--", "true")


def test_skipped_rows_are_not_told_before_an_error(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded(load_tasks("demo:heldout:1"), ["rows.jsonl:2: it needs a network"])
    monkeypatch.setattr(assembly, "load_with_report", lambda spec, skip_unsupported: loaded)
    assert mistake("eval", "a set", "--sampler", "oracle", "--task-ids", "none").startswith("--task-ids = 'none': ")
    assert mistake("eval", "a set", "--sampler", "oracle", "--run-dir", "/dev/null").startswith("--run-dir = ")


@pytest.mark.parametrize("damage", [DAMAGED, DAMAGED[:12], b"no gzip", gzip.compress(b"{}")[:-3]])
def test_a_damaged_gzip_file_is_a_mistake_for_every_reader(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(damage)
    for read in (RecordedScript.read, load_tasks):
        with pytest.raises(ConfigError, match=r"rows\.jsonl\.gz"):
            read(str(path))


def test_a_set_without_known_wrong_programs_says_so(state_dir: Path, tmp_path: Path, capsys: Any) -> None:
    row = {
        "id": "one",
        "prompt": "",
        "entry_points": ["f"],
        "oracle": "def f(): pass",
        "hidden_tests": {"type": "code", "snippets": ["f()"]},
    }
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(row))
    assert main(["verify", str(path), "--solutions", "wrong", "--state-dir", str(state_dir), "--json"]) == 0
    assert "note: 1 of 1 tasks have no known wrong program" in capsys.readouterr().err
