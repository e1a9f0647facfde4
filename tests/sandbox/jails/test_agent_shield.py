"""Code in a sandbox has the uid of its agent, and still cannot starve, limit or stop what reports on it."""

from __future__ import annotations

import anyio
import pytest

from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, JailName, Limits, Reason, SandboxSpec

pytestmark = pytest.mark.anyio

ATTACK = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
allowed = []
for name in ("NOFILE", "CPU", "NPROC", "AS", "DATA", "STACK", "FSIZE"):
    try:
        resource.prlimit(1, getattr(resource, "RLIMIT_" + name), (0, 0))
        allowed.append(name)
    except PermissionError:
        pass
for number, arguments in (
    (144, (1, 5, ctypes.byref(ctypes.c_int(0)))), (142, (1, ctypes.byref(ctypes.c_int(0)))),
    (203, (1, 8, ctypes.byref(ctypes.c_ulong(1)))), (141, (0, 1, 19)), (141, (2, 0, 19)), (251, (1, 1, 3 << 13)),
    (251, (3, 0, 3 << 13)), (256, (1, 64, None, None)),
) if os.uname().machine == "x86_64" else ():
    if libc.syscall(number, *arguments) == 0:
        allowed.append(number)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # its own it may
resource.prlimit(os.getpid(), resource.RLIMIT_CORE, (0, 0))
os.nice(1)
print(allowed)
raise SystemExit(1)
"""


async def test_no_call_changes_the_agents_limits_or_priority(state_dir: str, jail: JailName) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        async with host.acquire(SandboxSpec(image="python", jail=jail, limits=Limits(pids=64))) as box:
            outcome = await box.run(Command(argv=("python3", "-c", ATTACK)))
            assert (outcome.reason, outcome.exit_code, outcome.stdout) == (Reason.EXIT, 1, b"[]\n"), outcome.stderr
            assert (await box.run(Command(argv=("true",)))).ok


async def test_code_that_stops_its_keeper_still_ends_as_an_outcome(state_dir: str, jail: JailName) -> None:
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")
    async with SandboxHost.start(config) as host, host.acquire(SandboxSpec(jail=jail)) as box:
        with anyio.fail_after(8):  # less than a fault would take
            command = Command(argv=("sh", "-c", "kill -STOP $PPID; exit 1"), timeout_s=0.5)
            assert (await box.run(command)).reason in (Reason.TIMEOUT, Reason.EXIT)
            command = Command(argv=("sh", "-c", "kill -STOP $PPID; sleep 60"), timeout_s=0.5)
            assert (await box.run(command)).reason is Reason.TIMEOUT
        assert (await box.run(Command(argv=("true",)))).ok


SURVIVORS = """
kill -9 $PPID
setsid sleep 1000 &
(sleep 1000 & sleep 1000) &
exec sleep 1000
"""
NAMES = "cat /proc/[0-9]*/comm 2>/dev/null | grep -c sleep; true"


async def test_who_kills_its_keeper_ends_with_all_that_it_started_and_with_nothing_else(
    state_dir: str, jail: JailName
) -> None:
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")
    async with SandboxHost.start(config) as host, host.acquire(SandboxSpec(jail=jail)) as box:
        assert (await box.run(Command(argv=("sh", "-c", "sleep 1000 & sleep 1000 &")))).ok
        async with box.start(Command(argv=("sleep", "1000"))) as beside:
            outcome = await box.run(Command(argv=("sh", "-c", SURVIVORS), timeout_s=20))
            assert (outcome.reason, outcome.signal) == (Reason.SIGNAL, 9)
            assert (await box.run(Command(argv=("sh", "-c", NAMES)))).stdout == b"3\n"
            assert beside.running


STORM = "while :; do kill -9 -1; done"
MANY_STORMS = "kill -9 $PPID; while :; do (while :; do kill -STOP -1; kill -9 -1; done) & done"
LATER_STORM = f"(until [ -e now ]; do sleep 0.01; done; {STORM}) & exit 0"


async def test_a_storm_of_kills_ends_with_its_command(state_dir: str, jail: JailName) -> None:
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")
    async with SandboxHost.start(config) as host, host.acquire(SandboxSpec(jail=jail)) as box:
        for storm in (STORM, MANY_STORMS):
            with anyio.fail_after(30):
                assert (await box.run(Command(argv=("sh", "-c", storm), timeout_s=60))).signal == 9
                assert (await box.run(Command(argv=("true",)))).ok
        assert (await box.run(Command(argv=("sh", "-c", LATER_STORM)))).ok
        with anyio.fail_after(30):
            assert (await box.run(Command(argv=("sh", "-c", "touch now; sleep 60"), timeout_s=60))).signal == 9
            assert (await box.run(Command(argv=("true",)))).ok
