"""A run that is killed or interrupted: what it had journaled stays, and the next run goes on behind it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout.cli.main import INTERRUPTED, main
from rollout.journal.reader import read_records
from rollout.journal.records import GroupRecord, RunHeader


@contextmanager
def running(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of 300 tasks that has finished its first groups."""
    command = [sys.executable, "-m", "rollout.cli.main", "run", "demo:heldout", "--sampler", "oracle"]
    command += ["--group-size", "2", "--run-dir", str(run_dir)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        assert "run" in process.stderr.readline()
        try:
            yield process
        finally:
            process.kill()


def group_ids(run_dir: Path) -> list[int]:
    return [record.group.group_id for record in read_records(run_dir) if isinstance(record, GroupRecord)]


def test_a_killed_run_keeps_its_groups_and_the_next_one_goes_on_behind_them(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = group_ids(tmp_path)
    assert 0 < len(before) < 300
    assert main(["run", "demo:heldout:4", "--sampler", "oracle", "--group-size", "2", "--run-dir", str(tmp_path)]) == 0
    after = group_ids(tmp_path)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 4
    assert len(set(after)) == len(after)
    assert sum(isinstance(record, RunHeader) for record in read_records(tmp_path)) == 2


def test_an_interrupted_run_ends_soon_and_says_so(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        rest = process.stderr.read()
        assert process.wait(timeout=10) == INTERRUPTED
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert len(group_ids(tmp_path)) > 0
