"""The main job as a process: it completes, it survives kills, it leaves nothing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import msgspec
import pytest

from rollout.journal.reader import delivered_groups
from tests.integration.train_runs import census, processes_of, start_train, write_config

pytestmark = pytest.mark.timeout(300)

ROLES = ("engine", "learner", "server")
NUM_KILLS = int(os.environ.get("ROLLOUT_SOAK_KILLS", "3"))
"""`scripts/soak` raises it."""
GONE_S = 5.0


def wait_for(condition: object, deadline_s: float) -> bool:
    """Polls; True when `condition()` became true in time."""
    assert callable(condition)
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def assert_nothing_left(mark: str, state_dir: Path) -> None:
    assert wait_for(lambda: not processes_of(mark), GONE_S), processes_of(mark)
    assert wait_for(lambda: not census(state_dir), GONE_S), census(state_dir)


def test_a_run_trains_in_both_phases_and_leaves_nothing(tmp_path: Path, state_dir: Path) -> None:
    run_dir = tmp_path / "run"
    process = start_train(write_config(tmp_path, state_dir=state_dir), "--run-dir", run_dir, mark=str(tmp_path))
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err.decode()
    report = msgspec.json.decode(out)
    assert (report["sft_steps"], report["rl_steps"]) == (20, 3)
    assert report["before"]["num_samples"] == report["after"]["num_samples"] == 8
    assert report["after"]["weight_version"] > report["before"]["weight_version"]
    assert (run_dir / "learning.png").stat().st_size > 10_000
    assert not (run_dir / "server.sock").exists()
    assert_nothing_left(str(tmp_path), state_dir)

    # Without its journal the run is not gone on with: "before RL" would be measured after RL.
    shutil.rmtree(run_dir / "journal")
    resumed = start_train("--resume", run_dir, mark=str(tmp_path))
    _, err = resumed.communicate(timeout=100)
    assert resumed.returncode == 3, err.decode()
    assert err.decode().splitlines()[-1].startswith("fault: JournalFault: the journal in ")
    assert b"0 whole RL steps and 0 deliveries, the learner's checkpoint 3 steps and 18 deliveries" in err


@pytest.mark.parametrize("kill", range(NUM_KILLS))
def test_a_killed_run_leaves_nothing_and_goes_on_from_its_checkpoint(
    tmp_path: Path, state_dir: Path, kill: int
) -> None:
    """`kill -9` of one process at a random moment: the rest ends by itself, and `--resume` completes the run."""
    rng = random.Random(kill)
    role = ROLES[kill % len(ROLES)]
    run_dir, mark = tmp_path / "run", str(tmp_path)
    config = write_config(tmp_path, rl_steps=6, state_dir=state_dir)
    process = start_train(config, "--run-dir", run_dir, mark=mark)
    assert wait_for(lambda: role in processes_of(mark), 60.0)
    moment = rng.uniform(0.0, 1.0)
    wait_for(lambda: process.poll() is not None, 20.0 * moment)
    victim = processes_of(mark).get(role)
    if victim is not None:
        os.kill(victim, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    if process.returncode == 0:  # the moment came when all was done, or one is no longer needed
        assert msgspec.json.decode(out)["rl_steps"] == 6
    elif victim is not None and role != "engine":
        assert process.returncode == 3, err.decode()
        assert b"killed by SIGKILL" in err
        assert b"--resume" in err
    assert_nothing_left(mark, state_dir)

    resumed = start_train("--resume", run_dir, mark=mark)
    out, err = resumed.communicate(timeout=200)
    assert resumed.returncode == 0, err.decode()
    assert msgspec.json.decode(out)["rl_steps"] == 6
    deliveries = list(delivered_groups(run_dir))
    assert [one.step for one in deliveries] == [step for step in range(6) for _ in range(3)]
    assert [one.seq_start for one in deliveries] == list(range(0, 36, 2)), "a delivery was lost or doubled"
    assert_nothing_left(mark, state_dir)


def test_an_interrupted_run_ends_cleanly_and_says_how_to_go_on(tmp_path: Path, state_dir: Path) -> None:
    mark = str(tmp_path)
    config = write_config(tmp_path, rl_steps=500, state_dir=state_dir)
    process = start_train(config, "--run-dir", tmp_path / "run", mark=mark)
    assert wait_for(lambda: (tmp_path / "run" / "checkpoints").is_dir(), 60.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"--resume" in err
    assert b"Traceback" not in err
    assert_nothing_left(mark, state_dir)


def test_a_context_without_room_for_a_prompt_is_refused_before_anything_starts(tmp_path: Path, state_dir: Path) -> None:
    config = write_config(tmp_path, state_dir=state_dir)
    config.write_text(config.read_text().replace("max_context_tokens = 80", "max_context_tokens = 2"))
    process = start_train(config, "--run-dir", tmp_path / "run", mark=str(tmp_path))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2, err.decode()
    assert b"engine.max_context_tokens = 2: the prompt of task" in err
    assert not (tmp_path / "run" / "journal").exists()
