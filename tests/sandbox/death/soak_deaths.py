"""Engines killed at random moments while their sandboxes start, run and close, in full: `scripts/soak deaths`.

Prints a line per kill and a summary; exits 1 when anything was left, or an engine beside them was disturbed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sandbox.estate.state import reconcile
from sandbox.health.census import take_census
from sandbox.health.processes import snapshot, with_descendants
from sandbox.types import JAIL_NAMES, JailName
from tests.sandbox.death.mortal_engine import Plan
from tests.sandbox.death.mortals import MortalEngine, command, mortal_engine, variables

VICTIMS = ("engine", "both", "engine", "both-reversed", "early")
"""In turn: the engine alone, its warden with it (in either order), and an engine that may still be coming up."""
LONGEST_S = 1.2
"""The kill comes within this time after the sandboxes are there."""
LIMIT_S = {"engine": 2.0, "both": 1.0, "both-reversed": 1.0, "early": 2.0}
_LOOK_S = 0.002
_AGAIN_S = 0.05


class Kill(msgspec.Struct, frozen=True):
    """One kill and what came of it."""

    jail: JailName
    victim: str
    after_s: float
    num_processes: int
    """Alive in sandboxes when it came."""
    gone_s: float
    """Until no process was left, and (where the warden lived on) no cgroup and no record either."""
    left: tuple[str, ...]
    """What was still there at the limit, or after the next start."""


def kill_once(state_dir: Path, jail: JailName, victim: str, after_s: float) -> Kill:
    """Starts an engine whose sandboxes come and go, kills it, and looks."""
    states = ("busy", "starting", "starting", "starting")
    plan = Plan(state_dir=str(state_dir), backend="auto", jail=jail, mark=f"6{os.getpid()}", states=states)
    if victim == "early":
        return _kill_early(plan, after_s)
    with mortal_engine(plan) as engine:
        time.sleep(after_s)
        num_processes = len(engine.jailed())
        started = time.monotonic()
        engine.kill(victim)
        left = engine.processes_left if victim != "engine" else lambda: engine.processes_left() + engine.traces()
        gone_s = _wait_gone(left, started + LIMIT_S[victim]) - started
        time.sleep(_AGAIN_S)  # what forked while we looked would be seen now
        found = left()
        if victim != "engine":
            reconcile(state_dir)  # as the next engine does when it starts
            found += engine.traces()
    return Kill(jail, victim, after_s, num_processes, gone_s, tuple(found))


def _kill_early(plan: Plan, after_s: float) -> Kill:
    """The same, some time after the process was started, whatever it has come to."""
    with subprocess.Popen(
        command(plan), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=variables()
    ) as engine:
        time.sleep(after_s)
        num_processes = len(with_descendants([engine.pid], snapshot())) - 1
        engine.kill()
        started = time.monotonic()
        engine.wait()

    def left() -> list[str]:
        census = take_census(Path(plan.state_dir))
        cgroups = [path for path in census.cgroups if path.endswith(f"-{engine.pid}")]
        return [*census.dead_engines, *census.processes, *cgroups, *census.mounts]

    gone_s = _wait_gone(left, started + LIMIT_S["early"]) - started
    time.sleep(_AGAIN_S)
    return Kill(plan.jail, "early", after_s, num_processes, gone_s, tuple(left()))


def _wait_gone(left: Callable[[], list[str]], deadline: float) -> float:
    while left() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return time.monotonic()


def kill_often(state_dir: Path, num_kills: int, seed: int, tell: Callable[[str], None]) -> list[Kill]:
    """That many kills, beside an engine that is asked after each whether it still lives.

    Raises:
        AssertionError: it does not.
    """
    rng = random.Random(seed)
    kills = []
    beside_plan = Plan(
        state_dir=str(state_dir),
        backend="auto",
        jail="bubblewrap",
        mark=f"7{os.getpid()}",
        states=("busy", "answering"),
    )
    with mortal_engine(beside_plan) as beside:
        neighbours = _identities(beside)
        for number in range(num_kills):
            jail = JAIL_NAMES[number // len(VICTIMS) % len(JAIL_NAMES)]
            kill = kill_once(state_dir, jail, VICTIMS[number % len(VICTIMS)], rng.uniform(0, LONGEST_S))
            kills.append(kill)
            left = ", ".join(kill.left) or "nothing"
            tell(
                f"kill {number + 1}: {kill.victim} ({kill.jail}) after {kill.after_s:.3f} s, "
                f"{kill.num_processes} processes; gone in {kill.gone_s:.3f} s; left: {left}"
            )
            assert beside.answers(f"kill {number}"), "an engine beside it has lost a sandbox"
            assert _identities(beside) == neighbours, "an engine beside it has lost a process"
    return kills


def _identities(engine: MortalEngine) -> set[tuple[int, int]]:
    return {(info.pid, info.started) for info in engine.jailed()}


def main() -> int:
    """Runs the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="default: another one each time")
    arguments = parser.parse_args()
    state_dir = Path(tempfile.mkdtemp(prefix="rollout-deaths-"))
    state_dir.chmod(0o755)
    try:
        kills = kill_often(state_dir, arguments.kills, arguments.seed, lambda line: print(line, flush=True))
    finally:
        shutil.rmtree(state_dir)
    gone = sorted(kill.gone_s for kill in kills)
    failures = [kill for kill in kills if kill.left]
    print(
        f"{len(kills)} kills (seed {arguments.seed}): all gone in p50 {statistics.median(gone):.3f} s, "
        f"at most {gone[-1]:.3f} s; kills that left something: {len(failures)}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
