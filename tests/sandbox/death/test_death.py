"""Whoever dies, whatever the sandboxes are doing, nothing is left: no restart is needed, and who survives is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import pytest

from sandbox.cgroup.probe import BackendName
from sandbox.errors import SandboxDiedError, SandboxError
from sandbox.estate.state import reconcile
from sandbox.health.processes import ProcessInfo, inspect, lives, snapshot, with_descendants
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, JailName, SandboxSpec
from tests.sandbox.conftest import UNPRIVILEGED_UID
from tests.sandbox.death.mortal_engine import Plan, own_uid_base
from tests.sandbox.death.mortals import mortal_engine
from tests.sandbox.death.soak_deaths import kill_often
from tests.sandbox.estate.subordinates import enter_with_account
from tests.sandbox.waiting import until, wait_until

LIMIT_S = {"warden": 2.0, "engine": 2.0, "both": 1.0, "both-reversed": 1.0}
"""The promise, for each victim."""
AGAIN_S = 0.05
TRUE = Command(argv=("true",))


class Someone(NamedTuple):
    """Whose engine it is, and what holds its processes together."""

    state_dir: Path
    backend: BackendName
    python: Sequence[str] | None = None
    env: Mapping[str, str] | None = None


@pytest.fixture(params=["auto", "none", "unprivileged", "subordinate"])
def someone(
    request: pytest.FixtureRequest,
    state_dir: Path,
    unprivileged: tuple[list[str], dict[str, str], Path],
    tmp_path: Path,
) -> Someone:
    """This user with what the host has, this user without cgroups, and two without any privilege.

    One of those shares its uid with all of its sandboxes, the other has a range of subordinate uids to give them.
    """
    if request.param in ("auto", "none"):
        return Someone(state_dir, request.param)
    if os.geteuid() != 0:
        pytest.skip("environment: only root can become somebody else")
    python, env, own = unprivileged
    if request.param == "subordinate":
        python = [*enter_with_account(tmp_path, UNPRIVILEGED_UID, own, f"worker:{own_uid_base()}:65536\n"), *python]
    return Someone(own, "auto", python, env)


def family_of(host: SandboxHost) -> list[ProcessInfo]:
    """Its warden, and everything below that."""
    return with_descendants([host._warden.pid], snapshot())


def plan(someone: Someone, jail: JailName, *states: str) -> Plan:
    made = Plan(state_dir=str(someone.state_dir), backend=someone.backend, jail=jail, mark=f"3{os.getpid()}")
    return msgspec.structs.replace(made, states=states) if states else made


@pytest.mark.parametrize("victim", LIMIT_S)
def test_nothing_is_left_whoever_dies_and_whatever_the_sandboxes_are_doing(
    someone: Someone, jail: JailName, victim: str
) -> None:
    """Idle, busy, frozen (or stopped, where nothing freezes), in a fork storm, and starting and closing."""
    what = plan(someone, jail)
    with mortal_engine(what, someone.python, someone.env) as engine:
        engine.stop_some()
        assert len(engine.jailed()) > len(what.states)
        engine.kill(victim)
        wait_until(lambda: not engine.processes_left(), LIMIT_S[victim])
        time.sleep(AGAIN_S)  # what forked while we looked would be seen now
        assert engine.processes_left() == []
        if victim == "warden":
            assert engine.faults() == dict.fromkeys(what.states, "SandboxDiedError")
            assert engine.processes_left() == []
        if victim == "engine":
            wait_until(lambda: not engine.traces(), LIMIT_S[victim])
    reconcile(someone.state_dir)  # as the next engine does when it starts
    assert engine.traces() == []


@pytest.mark.anyio
@pytest.mark.parametrize("backend", ["auto", "none"])
async def test_the_next_start_cleans_up_after_both_and_an_engine_beside_them_loses_nothing(
    state_dir: Path, backend: BackendName, jail: JailName
) -> None:
    someone = Someone(state_dir, backend)
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend=backend, uid_base=own_uid_base())
    with (
        mortal_engine(plan(someone, jail, "busy", "frozen", "answering")) as beside,
        mortal_engine(plan(someone, jail)) as engine,
    ):
        mine = {(info.pid, info.started) for info in beside.jailed()}
        engine.kill("both")
        await until(lambda: inspect(engine.ready.warden) is None, 1)  # it holds the lock until it has ended
        async with SandboxHost.start(config) as host:
            assert host._slot.number == engine.ready.slot  # its place, and so its numbers, are free
            await until(lambda: not engine.processes_left(), 1)
            assert not any(map(os.path.exists, engine.ready.roots))
            async with host.acquire(SandboxSpec(jail=jail)) as box:
                assert (await box.run(TRUE)).ok
        assert {(info.pid, info.started) for info in beside.jailed()} == mine
        assert all(map(os.path.exists, beside.ready.roots))
        assert beside.answers("still here")


def test_engines_killed_at_random_moments_leave_nothing(state_dir: Path) -> None:
    """`scripts/soak deaths` does it two hundred times."""
    kills = kill_often(state_dir, 10, os.getpid(), print)
    assert [kill for kill in kills if kill.left] == []


@pytest.mark.anyio
async def test_after_the_wardens_death_everything_is_refused_and_the_end_is_clean(
    state_dir: Path, jail: JailName
) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        async with host.acquire(SandboxSpec(jail=jail)) as box:
            async with box.start(Command(argv=("sleep", "600"), timeout_s=600)) as process:
                family = family_of(host)
                os.kill(host._warden.pid, signal.SIGKILL)
                with pytest.raises(SandboxDiedError):
                    await process.wait()
                await until(lambda: not any(map(lives, family)), 2)
            with pytest.raises(SandboxDiedError):
                await box.read_file("x", 1)
        with pytest.raises(SandboxError):
            async with host.acquire(SandboxSpec(jail=jail)):
                pass
    assert not any(map(os.path.exists, host.backend.roots))


@pytest.mark.anyio
async def test_a_warden_that_is_told_to_end_takes_everything_with_it_and_every_use_is_a_fault(
    state_dir: Path, jail: JailName
) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        async with host.acquire(SandboxSpec(jail=jail)) as box:  # its control groups are the next one's
            assert (await box.run(TRUE)).ok
        async with host.acquire(SandboxSpec(jail=jail)) as box:
            os.kill(host._warden.pid, signal.SIGTERM)
            with pytest.raises(SandboxDiedError):
                await box.run(Command(argv=("sleep", "600"), timeout_s=600))
            await until(lambda: not any(map(os.path.exists, host.backend.roots)))
        with pytest.raises(SandboxDiedError):
            async with host.acquire(SandboxSpec(jail=jail)):
                pass


@pytest.mark.anyio
async def test_a_sandbox_whose_agent_dies_is_a_fault_and_its_siblings_live(state_dir: Path, jail: JailName) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        async with host.acquire(SandboxSpec(jail=jail)) as sibling:
            async with host.acquire(SandboxSpec(jail=jail)) as box:
                agents = [info for info in family_of(host) if info.name == "rollout-agent"]
                async with box.start(Command(argv=("sleep", "600"), timeout_s=600)) as process:
                    os.kill(max(agents, key=lambda info: (info.started, info.pid)).pid, signal.SIGKILL)
                    with pytest.raises(SandboxDiedError), anyio.fail_after(5):
                        await process.wait()
            await until(lambda: not any(info.words[:1] == ("sleep",) for info in family_of(host)))
            assert (await sibling.run(Command(argv=("true",)))).ok
        async with host.acquire(SandboxSpec(jail=jail)) as box:
            assert (await box.run(Command(argv=("true",)))).ok


@pytest.mark.anyio
async def test_cancelling_a_start_leaves_nothing_half_built(state_dir: Path, jail: JailName) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        for step in range(12):
            with anyio.move_on_after(0.001 * step):
                async with host.acquire(SandboxSpec(jail=jail)):
                    pass
        assert host.num_live == 0
        await until(lambda: len(family_of(host)) == 1)
