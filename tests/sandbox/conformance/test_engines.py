"""Engines and supervisors that die: what they held is gone, and nobody else's is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from sandbox.census import take_census
from sandbox.errors import SandboxDiedError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.processes import snapshot
from sandbox.types import Command, JailName, Reason
from tests.sandbox.conformance.arena import PATIENCE_S, Arena, below, eventually, sh, shell, warden_of

pytestmark = pytest.mark.anyio

SCRIPT = Path(__file__).resolve().parent.parent / "engine_process.py"
REPOSITORY = SCRIPT.parent.parent.parent


class Other:
    """Another engine on the same state directory: three sandboxes, nine sleeps, and a churn of starts."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        assert process.stdout is not None
        self.process = process
        self.mark = mark
        words = process.stdout.readline().split()
        self.warden, self.roots = int(words[0]), words[1:]

    def sleeps(self) -> int:
        """Its processes that are meant to last."""
        return sum(info.words[:1] == ("sleep",) and info.words[-1] == self.mark for info in snapshot().values())


@contextmanager
def other_engine(state_dir: Path, jail: JailName, mark: str) -> Iterator[Other]:
    """Killed at the end, if it still lives."""
    argv = [sys.executable, str(SCRIPT), str(state_dir), "auto", mark, jail]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield Other(process, mark)
        finally:
            process.kill()


async def test_when_one_of_three_engines_dies_the_next_reclaims_only_what_it_held(
    arena: Arena, state_dir: Path, jail: JailName
) -> None:
    mark = f"7{os.getpid()}"
    with other_engine(state_dir, jail, f"{mark}1") as dead, other_engine(state_dir, jail, f"{mark}2") as alive:
        await eventually(lambda: dead.sleeps() == alive.sleeps() == 9, PATIENCE_S)
        dead.process.kill()
        os.kill(dead.warden, signal.SIGKILL)
        dead.process.wait()
        await eventually(lambda: dead.sleeps() == 0)
        async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as next_one:
            assert not any(map(os.path.exists, dead.roots))
            async with next_one.acquire(arena.spec) as box:
                assert (await sh(box, "true")).ok
            assert {alive.process.pid, os.getpid()} <= set(take_census(state_dir).engines)
            assert alive.sleeps() == 9
            assert all(map(os.path.exists, alive.roots))
        async with arena.hostile() as box:  # with all checks on the sibling, which was there all the time
            assert (await sh(box, "true")).ok
        alive.process.kill()
        alive.process.wait()
        await eventually(lambda: alive.sleeps() == 0 and not any(map(os.path.exists, alive.roots)))
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (dead.warden, alive.warden)))


async def test_a_killed_supervisor_takes_its_sandbox_along_and_leaves_no_cgroup(arena: Arena, full: bool) -> None:
    """The process that the jail tool leaves outside, killed while a command and its children run."""
    warden = warden_of(arena.host)
    for number in range(1000 if full else 12):
        before = below(warden)
        async with arena.host.acquire(arena.spec) as box:
            await sh(box, "setsid sleep 600 & sleep 600 &")
            table = snapshot()
            supervisors = [pid for pid in below(warden) - before if table[pid].parent == warden]
            async with box.start(Command(argv=("sleep", "600"), timeout_s=600)) as process:
                for pid in supervisors:
                    os.kill(pid, signal.SIGKILL)
                with pytest.raises(SandboxDiedError), anyio.fail_after(PATIENCE_S):
                    await process.wait()
        assert below(warden) <= before, number
        assert (await sh(arena.sibling, "true")).ok
    sets = {entry.name for root in arena.host.backend.roots for entry in os.scandir(root) if entry.is_dir()}
    assert len(sets) <= 3  # the sibling's, and what waits for the next sandbox: they do not grow with the kills


async def test_a_killed_warden_is_a_fault_in_every_sandbox_and_leaves_nothing(
    config: SandboxConfig, arena: Arena
) -> None:
    async with SandboxHost.start(config) as host, host.acquire(arena.spec) as one, host.acquire(arena.spec) as two:
        roots, warden = host.backend.roots, warden_of(host)
        inside = below(warden)
        async with one.start(shell("sleep 600", timeout_s=600)) as process:
            os.kill(warden, signal.SIGKILL)
            with pytest.raises(SandboxDiedError), anyio.fail_after(PATIENCE_S):
                await process.wait()
        await eventually(lambda: not two.alive)
        with pytest.raises(SandboxDiedError):
            await sh(two, "true")
        await eventually(lambda: inside.isdisjoint(snapshot()))
    assert not any(map(os.path.exists, roots))
    assert (await sh(arena.sibling, "true")).ok


async def test_cancelling_a_start_leaves_nothing_half_built(arena: Arena) -> None:
    before, num_live = below(warden_of(arena.host)), arena.host.num_live
    for step in range(15):
        with anyio.move_on_after(0.002 * step):
            async with arena.host.acquire(arena.spec):
                pass
    assert arena.host.num_live == num_live
    await eventually(lambda: below(warden_of(arena.host)) <= before)
    assert (await sh(arena.sibling, "true")).reason is Reason.EXIT
