"""A host and its sandboxes: what is fresh, what is shared, what is refused and what waits."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import pytest

from sandbox.errors import CapabilityError, ConfigError, SandboxDiedError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, Outcome, Reason, SandboxSpec
from tests.sandbox.children import children_of

pytestmark = pytest.mark.anyio
LIMITS = Limits(memory_bytes=96 * MIB, disk_bytes=16 * MIB, pids=24, file_size_bytes=64 * MIB)


@pytest.fixture
def small(jail: JailName) -> SandboxSpec:
    return SandboxSpec(limits=LIMITS, jail=jail)


@pytest.fixture
async def box(host: SandboxHost, small: SandboxSpec) -> AsyncIterator[Sandbox]:
    async with host.acquire(small) as box:
        yield box


async def sh(box: Sandbox, script: str, timeout_s: float = 20, cpu_s: float | None = None) -> Outcome:
    return await box.run(Command(argv=("sh", "-c", script), timeout_s=timeout_s, cpu_s=cpu_s))


async def names(box: Sandbox) -> list[bytes]:
    """Names of the processes inside, but for the agent, a keeper and the shell that asks."""
    script = "for p in /proc/[0-9]*; do read -r name < $p/comm && echo $name; done"
    kept = (await sh(box, script)).stdout.split()
    kept.remove(b"sh")
    return sorted(name for name in kept if not name.startswith(b"rollout-"))


def uids_of(mark: str) -> set[int]:
    """Host uids of the processes whose command line has that word."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it has just ended
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.add(entry.stat().st_uid)
    return found


async def test_the_outside_cannot_be_reached(box: Sandbox) -> None:
    script = """
import errno, os, socket
for family, kind in ((40, 1), (38, 5), (17, 3)):
    try: socket.socket(family, kind)
    except OSError as error: print(errno.errorcode[error.errno])
try: socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error: print(errno.errorcode[error.errno])
server = socket.create_server(("127.0.0.1", 0)); socket.create_connection(server.getsockname()); print("loopback")
for path in ("/proc/kallsyms", "/root", "/home", "/proc/1/environ", "/proc/1/fd"):
    try: told = os.listdir(path) if os.path.isdir(path) else open(path).read()
    except OSError: continue
    if told: print("told", path)
try: os.unshare
except AttributeError: pass
"""
    outcome = await box.run(Command(argv=("python3", "-I", "-S", "-c", script)))
    assert outcome.stdout.split() == [b"EAFNOSUPPORT"] * 3 + [b"ENETUNREACH", b"loopback"], outcome.stderr
    for forbidden in ("mount -t tmpfs x /tmp", "unshare -U true", "touch /usr/x", "touch /x", "cat /dev/mem"):
        assert not (await sh(box, forbidden)).ok, forbidden
    assert (await sh(box, "kill -9 1; kill -STOP 1; echo $?")).ok
    assert b"CapEff:\t0000000000000000" in (await sh(box, "cat /proc/self/status")).stdout


async def test_many_sandboxes_come_up_at_once(host: SandboxHost, small: SandboxSpec) -> None:
    async def one() -> None:
        async with host.acquire(small) as box:
            assert (await sh(box, "true")).ok

    async with anyio.create_task_group() as group:
        for _ in range(24):
            group.start_soon(one)
    assert host.num_live == 0


async def test_sandboxes_of_a_root_engine_run_as_uids_of_their_own(host: SandboxHost, small: SandboxSpec) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give each sandbox a uid of its own")
    mark = f"5{os.getpid()}"
    async with host.acquire(small) as one, host.acquire(small) as two:
        for box in (one, two):
            await sh(box, f"sleep {mark} &")
        uids = uids_of(mark)
    assert len(uids) == 2
    assert 0 not in uids


async def test_over_the_cap_a_sandbox_waits_for_a_free_place(state_dir: Path, small: SandboxSpec) -> None:
    config = SandboxConfig(state_dir=str(state_dir), max_sandboxes=1)
    async with SandboxHost.start(config) as host, anyio.create_task_group() as group:
        second_is_up = anyio.Event()

        async def second() -> None:
            async with host.acquire(small):
                second_is_up.set()

        async with host.acquire(small) as box:
            group.start_soon(second)
            assert (await sh(box, "true")).ok
            assert not second_is_up.is_set()
        with anyio.fail_after(20):
            await second_is_up.wait()


async def test_bad_requests_are_refused_before_anything_starts(host: SandboxHost, small: SandboxSpec) -> None:
    with pytest.raises(ConfigError, match="insist"):
        async with host.acquire(SandboxSpec(insist=("speed",))):
            pass
    with pytest.raises(ConfigError, match="image"):
        async with host.acquire(SandboxSpec(image="nonsense")):
            pass
    async with host.acquire(small) as box:
        with pytest.raises(ConfigError, match="argv"):
            await box.run(Command(argv=("echo", "x" * 300_000)))
        assert (await sh(box, "true")).ok


async def test_without_cgroups_limits_are_reported_and_a_spec_may_insist(state_dir: Path, small: SandboxSpec) -> None:
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")
    async with SandboxHost.start(config) as host:
        async with host.acquire(small) as box:
            assert (await sh(box, "true")).unenforced == ("memory", "cpus", "pids")
            await sh(box, "sleep 62 &")
            await sh(box, "(setsid sleep 63 &) ; sleep 64 & setsid sh -c 'sleep 65' & sleep 66", timeout_s=0.3)
            assert await names(box) == [b"sleep"]
            for _ in range(5):
                async with box.start(Command(argv=("sleep", "67"))) as process:
                    await process.kill()
                    assert (await process.wait()).reason is Reason.KILLED
        with pytest.raises(CapabilityError, match="memory"):
            async with host.acquire(SandboxSpec(insist=("memory",))):
                pass


async def test_who_uses_a_sandbox_after_its_end_is_told_how_it_ended(state_dir: Path, small: SandboxSpec) -> None:
    true, config = Command(argv=("true",)), SandboxConfig(state_dir=str(state_dir))
    async with AsyncExitStack() as stack:
        async with SandboxHost.start(config) as host:
            outlives = await stack.enter_async_context(host.acquire(small))
            async with host.acquire(small) as left, host.acquire(small) as closed:
                closed.close()
                with pytest.raises(SandboxDiedError, match=r"was closed \(`close` was called\)"):
                    await closed.run(true)
                assert (await left.run(true)).ok
            with pytest.raises(SandboxDiedError, match=r"was closed \(its context was left\)"):
                await left.run(true)
        with pytest.raises(SandboxDiedError, match=r"was closed \(its host was closed\)"):
            await outlives.run(true)


async def test_a_sandbox_whose_first_process_is_killed_says_so(state_dir: Path, small: SandboxSpec) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host, host.acquire(small) as box:
        async with box.start(Command(argv=("sleep", "60"))) as process:
            for pid in children_of(host._warden.pid):
                os.kill(int(pid), signal.SIGKILL)
            for use in (process.wait, box.usage):
                with (
                    anyio.fail_after(10),
                    pytest.raises(SandboxDiedError, match=r"has died \(its (first )?process ended"),
                ):
                    await use()
