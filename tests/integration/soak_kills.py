"""One run of the demo, killed at random moments and resumed each time, in full: `scripts/soak` calls it.

Prints a line per kill and a summary; exits 1 when anything was left behind, lost or doubled.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from rollout.journal.reader import delivered_groups
from sandbox.estate.state import default_state_dir
from tests.integration.train_runs import census, memfds, mounts, processes_of, start_train

ROLES = ("engine", "learner", "server")
GONE_S = 5.0


def main() -> int:
    """Runs the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", default="demo")
    parser.add_argument("--longest-s", type=float, default=25.0, help="a kill comes within this time of each start")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    failures = 0
    with tempfile.TemporaryDirectory(prefix="rollout-soak-") as folder:
        mark, run_dir = folder, Path(folder) / "run"
        before = mounts()
        words: list[str | Path] = [arguments.config, "--run-dir", run_dir]
        for number in range(arguments.kills):
            role = ROLES[number % len(ROLES)]
            after_s = rng.uniform(1.0, arguments.longest_s)
            process = start_train(*words, mark=mark)
            ended = kill_after(process, role, after_s, mark)
            gone_s, left = wait_gone(mark, before)
            failures += bool(left)
            print(
                f"kill {number + 1}: {role} after {ended}; gone in {gone_s:.2f} s; left: {left or 'nothing'}",
                flush=True,
            )
            words = ["--resume", run_dir]
        out, err = start_train(*words, mark=mark).communicate(timeout=1800)
        report = msgspec.json.decode(out) if out else None
        if report is None:
            print(err.decode())
            return 1
        deliveries = list(delivered_groups(run_dir))
        starts = [one.seq_start for one in deliveries]
        ends = [one.seq_start + len(one.group.trajectories) for one in deliveries]
        exactly_once = starts == [0, *ends[:-1]]
        failures += not exactly_once
        rates = [report[when]["pass_at_1"] for when in ("before", "after")]
        print(
            f"{arguments.kills} kills; pass@1 {rates[0]:.3f} -> {rates[1]:.3f}; "
            f"{len(deliveries)} groups delivered, each exactly once: {exactly_once}; failures: {failures}"
        )
    return 1 if failures else 0


def kill_after(process: subprocess.Popen[bytes], role: str, after_s: float, mark: str) -> str:
    """Kills one process of the run `after_s` after its start; returns when, or how the run ended before."""
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    victim = processes_of(mark).get(role)
    if victim is None:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)
        return f"{after_s:.1f} s (no {role} yet: the engine was killed)"
    os.kill(victim, signal.SIGKILL)
    process.communicate(timeout=60)
    return f"{after_s:.1f} s"


def wait_gone(mark: str, before: int) -> tuple[float, dict[str, object]]:
    """Seconds until nothing of the run was left, and what was still left at the deadline."""
    started = time.monotonic()
    left: dict[str, object] = {"processes": "not looked yet"}
    while left and time.monotonic() - started < GONE_S:
        left = leftovers(mark, before)
    return time.monotonic() - started, left


def leftovers(mark: str, before: int) -> dict[str, object]:
    """What the run left, by kind."""
    left: dict[str, object] = dict(census(default_state_dir()))
    if found := processes_of(mark):
        left["processes of the run"] = found
    if (now := mounts()) != before:
        left["mounts"] = f"{before} before, {now} now"
    if held := memfds(mark):
        left["shared memory"] = held
    return left


if __name__ == "__main__":
    sys.exit(main())
