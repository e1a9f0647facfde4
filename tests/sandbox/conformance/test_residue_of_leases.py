"""Whatever a tenant leaves in a jail, the next one finds nothing of it; or the jail does not serve again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from sandbox.cgroup.probe import BackendName
from sandbox.errors import SandboxDiedError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.jail import Jail
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, Reason, SandboxSpec
from tests.sandbox.conformance.arena import PATIENCE_S, below, eventually, python, sh, warden_of
from tests.sandbox.conformance.residue import KINDS, LOOK, Kind
from tests.sandbox.jails.probes import PRELUDE

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["auto", "none"])
async def host(request: pytest.FixtureRequest, state_dir: Path) -> AsyncIterator[SandboxHost]:
    """With the control groups that this user has, and without any."""
    backend: BackendName = request.param
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir), cgroup_backend=backend)) as host:
        if backend == "auto" and host.backend.name == "none":
            pytest.skip("environment: this user has no control groups, so both are the same")
        yield host


@pytest.fixture
async def kept(host: SandboxHost, spec: SandboxSpec) -> AsyncIterator[Jail]:
    """A jail that serves one tenant after the other."""
    jail = await host.build(spec.image, spec.jail, spec.user, spec.limits)
    yield jail
    assert await host.destroy(jail)
    assert host.num_live == 0


async def look(box: Sandbox) -> dict[str, Any]:
    """All that there is to see."""
    outcome = await box.run(python(LOOK, timeout_s=PATIENCE_S))
    assert outcome.ok, outcome.stderr.decode()
    found: dict[str, Any] = json.loads(outcome.stdout)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Parts of two looks that are not the same."""
    return {part: (one[part], other[part]) for part in one if one[part] != other[part]}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.replace(" ", "-"))
async def test_the_next_tenant_sees_nothing_of_the_last(
    host: SandboxHost, kept: Jail, spec: SandboxSpec, kind: Kind
) -> None:
    for _ in range(2):  # in the very first one a socket of the jail tool may still wait to be freed
        box = await host.lease(kept, spec)
        fresh = await look(box)
        assert await host.reset(box), kept.why_unclean
    box = await host.lease(kept, spec)
    planted = await box.run(python(PRELUDE + kind.plant, timeout_s=PATIENCE_S))
    assert planted.ok, planted.stderr.decode()
    if kind.shows:
        assert set(kind.shows) <= set(differences(fresh, await look(box))), "the look sees what is there"
    assert await host.reset(box), kept.why_unclean
    again = await host.lease(kept, spec)
    assert differences(fresh, await look(again)) == {}
    assert (again.jail, kept.num_leases) == (kept, 4)


TALK = """
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
"""
UNREACHABLE = 'attempt(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto, b"x", ("192.0.2.1", 9))'


@pytest.mark.parametrize("code", [TALK, UNREACHABLE], ids=["spoken", "failed"])
async def test_a_jail_whose_network_has_counted_anything_serves_nobody_else(
    host: SandboxHost, kept: Jail, spec: SandboxSpec, code: str
) -> None:
    """Ports that wait for late packets and the namespace's counters cannot be renewed."""
    box = await host.lease(kept, spec)
    assert (await box.run(python(PRELUDE + code))).ok
    assert not await host.reset(box)
    assert "network" in kept.why_unclean
    assert not kept.ready
    with pytest.raises(SandboxDiedError, match="not ready"):
        await host.lease(kept, spec)


async def test_counters_and_usage_begin_anew(host: SandboxHost, kept: Jail, spec: SandboxSpec) -> None:
    if host.backend.name == "none":
        pytest.skip("environment: nothing counts without control groups")
    box = await host.lease(kept, spec)
    hog = "x = bytearray(400 * 2**20)"
    bomb = "while true; do (sleep 60 &); done"
    assert (await box.run(python(hog))).reason is Reason.OOM
    assert (await sh(box, bomb, timeout_s=3)).reason in (Reason.TIMEOUT, Reason.PIDS, Reason.EXIT)
    assert (await sh(box, "head -c 12M /dev/zero > /tmp/data")).ok
    assert await host.reset(box), kept.why_unclean
    box = await host.lease(kept, spec)
    held = await box.usage()
    assert held.pids == 0
    assert held.cpu_s is not None
    assert held.cpu_s < 0.05
    assert held.memory_bytes is not None
    assert held.memory_bytes < 40 * MIB  # page cache of the image may stay
    assert held.peak_memory_bytes is None or held.peak_memory_bytes < 40 * MIB
    outcome = await sh(box, "exit 3")
    assert (outcome.reason, outcome.usage.oom_kills) == (Reason.EXIT, 0)
    assert outcome.usage.peak_memory_bytes < 40 * MIB
    assert (await box.run(python("x = bytearray(60 * 2**20)"))).ok, "its limits are whole again"


async def test_a_lease_of_another_size_gets_mounts_of_that_size(
    host: SandboxHost, kept: Jail, spec: SandboxSpec
) -> None:
    larger = msgspec.structs.replace(spec.limits, disk_bytes=2 * spec.limits.disk_bytes, inodes=99)
    for limits in (spec.limits, larger, larger, spec.limits):
        box = await host.lease(kept, msgspec.structs.replace(spec, limits=limits))
        size = await box.run(python("import os; f = os.statvfs('/tmp'); print(f.f_blocks * f.f_frsize, f.f_ffree)"))
        assert size.stdout.split() == [b"%d" % limits.disk_bytes, b"%d" % limits.inodes]
        assert await host.reset(box), kept.why_unclean


TOUCHES = {
    "nothing": "pass",
    "made and removed": 'os.mkdir("/tmp/x"); os.rmdir("/tmp/x")',
    "written and removed": 'open("/dev/shm/x", "w").write("x"); os.remove("/dev/shm/x")',
    "closed and opened": 'os.chmod("/workspace", 0); os.chmod("/workspace", 0o755)',
    "dated": 'found = os.stat("/tmp"); os.utime("/tmp", ns=(found.st_atime_ns, found.st_mtime_ns))',
    "kept": 'os.makedirs("/workspace/a/b")',
}


@pytest.mark.parametrize("touch", TOUCHES)
async def test_mounts_are_new_unless_nobody_has_touched_them(
    host: SandboxHost, kept: Jail, spec: SandboxSpec, touch: str
) -> None:
    devices = []
    for code in ("pass", TOUCHES[touch], "pass"):
        box = await host.lease(kept, spec)
        told = await box.run(python(f"import os; print(os.stat('/dev/shm').st_dev); {code}"))
        assert told.ok, told.stderr
        devices.append(told.stdout)
        assert await host.reset(box), kept.why_unclean
    assert devices[0] == devices[1]
    assert (devices[1] == devices[2]) is (touch == "nothing")


async def test_a_lease_that_ends_under_its_commands_tells_them_and_spares_the_next(
    host: SandboxHost, kept: Jail, spec: SandboxSpec
) -> None:
    box = await host.lease(kept, spec)
    outcomes = []

    async def work(started: anyio.Event) -> None:
        async with box.start(Command(argv=("sh", "-c", "sleep 600 & wait"), timeout_s=600)) as process:
            started.set()
            outcomes.append(await process.wait())

    async with anyio.create_task_group() as group:
        for _ in range(3):
            started = anyio.Event()
            group.start_soon(work, started)
            await started.wait()
        assert await host.reset(box), kept.why_unclean
    assert [outcome.reason for outcome in outcomes] == [Reason.KILLED] * 3
    for use in (box.run(Command(argv=("true",))), box.usage(), box.read_file("x", 1), box.write_file("x", b"")):
        with pytest.raises(SandboxDiedError):
            await use
    again = await host.lease(kept, spec)
    box.close()
    assert (await sh(again, "true")).ok, "who had the jail before cannot end it any more"


async def test_a_frozen_tenant_leaves_and_the_next_one_moves(host: SandboxHost, kept: Jail, spec: SandboxSpec) -> None:
    if host.backend.name == "none":
        pytest.skip("environment: nothing can be frozen without control groups")
    for _ in range(3):
        box = await host.lease(kept, spec)
        async with box.start(Command(argv=("sleep", "600"), timeout_s=600)):
            await box.freeze()
            assert await host.reset(box), kept.why_unclean
    box = await host.lease(kept, spec)
    assert (await sh(box, "true")).ok


async def test_a_jail_that_dies_is_not_leased_and_tells_who_waits(
    host: SandboxHost, kept: Jail, spec: SandboxSpec
) -> None:
    told: list[str | None] = []
    kept.on_death = lambda: told.append(kept.why_died)
    box = await host.lease(kept, spec)
    (agent,) = below(warden_of(host))
    os.kill(agent, signal.SIGKILL)
    await eventually(lambda: not kept.alive)
    assert told == [kept.why_died] != [None]
    assert not await host.reset(box)
    with pytest.raises(SandboxDiedError):
        await host.lease(kept, spec)


async def test_what_waits_for_room_in_the_socket_is_not_sent_to_the_next_tenant(
    host: SandboxHost, kept: Jail, spec: SandboxSpec
) -> None:
    box = await host.lease(kept, spec)
    ghosts = [Command(argv=("touch", f"/workspace/{number}"), env={"X": "x" * 60_000}) for number in range(200)]

    async def haunt(command: Command) -> None:
        with suppress(SandboxDiedError):
            while True:
                await box.run(command)

    async with anyio.create_task_group() as group:
        for command in ghosts:
            group.start_soon(haunt, command)
        await anyio.sleep(0.05)
        assert await host.reset(box), kept.why_unclean
        again = await host.lease(kept, spec)
        for _ in range(5):
            assert (await sh(again, "ls -A /workspace")).stdout == b""
