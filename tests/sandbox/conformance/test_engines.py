"""Engines and supervisors that die: what they held is gone, and nobody else's is touched."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest

from sandbox.errors import SandboxDiedError
from sandbox.health.census import take_census
from sandbox.health.processes import snapshot
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, JailName
from tests.sandbox.conformance.arena import PATIENCE_S, Arena, below, eventually, sh, warden_of
from tests.sandbox.death.mortal_engine import Plan
from tests.sandbox.death.mortals import mortal_engine

pytestmark = pytest.mark.anyio

STATES = ("idle", "busy", "answering")


async def test_when_one_of_three_engines_dies_the_next_reclaims_only_what_it_held(
    arena: Arena, config: SandboxConfig, state_dir: Path, jail: JailName
) -> None:
    first, second = (
        Plan(state_dir=str(state_dir), backend="auto", jail=jail, mark=f"7{os.getpid()}{number}", states=STATES)
        for number in (1, 2)
    )
    with mortal_engine(first) as living, mortal_engine(second) as dead:
        held = set(living.ready.roots)
        dead.kill("both")
        await eventually(lambda: not dead.processes_left(), instead=dead.processes_left)
        async with SandboxHost.start(config) as next_one, next_one.acquire(arena.spec) as box:
            assert (await sh(box, "true")).ok
            assert dead.traces() == []
            assert {living.ready.pid, os.getpid()} <= set(take_census(state_dir).engines)
        assert living.answers("still here")
        assert set(filter(os.path.exists, held)) == held
        async with arena.hostile() as box:  # with all checks on the sibling, which was there all the time
            assert (await sh(box, "true")).ok
        living.kill("engine")
        await eventually(lambda: not living.processes_left(), instead=living.processes_left)
        await eventually(lambda: not any(map(os.path.exists, held)))


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
