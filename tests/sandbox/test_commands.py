"""Commands in a live sandbox: reasons, output, background children, cancellation."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from sandbox.errors import CapabilityError, ConfigError, SandboxDiedError, TransferError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, Outcome, Reason, SandboxSpec

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


def skip_unless(box: Sandbox, limit: str) -> None:
    if limit in box.unenforced:
        pytest.skip(f"this host does not enforce {limit}")


async def test_state_lives_on_between_commands_and_fresh_sandboxes_have_none(
    host: SandboxHost, small: SandboxSpec
) -> None:
    async with host.acquire(small) as box:
        assert (await sh(box, "echo kept > f; id -u; pwd")).stdout == b"1000\n/workspace\n"
        assert (await sh(box, "cat f")).stdout == b"kept\n"
    async with host.acquire(small) as box:
        assert (await sh(box, "ls -A /workspace /tmp /dev/shm")).stdout.split() == [
            b"/dev/shm:",
            b"/tmp:",
            b"/workspace:",
        ]


async def test_the_environment_is_minimal_and_the_command_adds_its_own(box: Sandbox) -> None:
    outcome = await box.run(Command(argv=("env",), env={"MORE": "1"}))
    variables = dict(line.split(b"=", 1) for line in outcome.stdout.splitlines())
    assert variables.pop(b"MORE") == b"1"
    assert set(variables) == {b"PATH", b"HOME", b"LANG", b"PYTHONDONTWRITEBYTECODE", b"PYTHONHASHSEED"}


async def test_exit_signal_and_timeout_are_three_reasons(box: Sandbox) -> None:
    seen = [await sh(box, "exit 7"), await sh(box, "kill -KILL $$"), await sh(box, "sleep 60", timeout_s=0.1)]
    assert [(o.reason, o.exit_code, o.signal) for o in seen] == [
        (Reason.EXIT, 7, None),
        (Reason.SIGNAL, None, 9),
        (Reason.TIMEOUT, None, 9),
    ]


async def test_a_missing_program_and_a_missing_directory_are_the_commands_own_failure(box: Sandbox) -> None:
    outcome = await box.run(Command(argv=("no-such-program",)))
    assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 127)
    assert b"no-such-program" in outcome.stderr
    outcome = await box.run(Command(argv=("true",), cwd="/nowhere"))
    assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 126)


async def test_out_of_memory_kills_the_hog_and_not_the_sandbox(box: Sandbox) -> None:
    skip_unless(box, "memory")
    hog = await box.run(Command(argv=("python3", "-I", "-S", "-c", "x = bytearray(10**9)")))
    assert (hog.reason, hog.usage.oom_kills) == (Reason.OOM, 1)
    assert hog.usage.peak_memory_bytes > 80 * MIB
    after = await sh(box, "true")
    assert after.ok
    assert after.usage.oom_kills == 0
    assert after.usage.peak_memory_bytes < 40 * MIB


async def test_a_full_disk_is_named_and_can_be_emptied_again(box: Sandbox) -> None:
    full = await sh(box, "head -c 20000000 /dev/zero > f")
    assert full.reason is Reason.DISK
    assert (await sh(box, "rm f && echo x > g")).ok
    used_up = await sh(box, "i=0; while [ $i -lt 20000 ]; do : > n$i || exit 1; i=$((i+1)); done")
    assert used_up.reason is Reason.DISK


async def test_a_refused_fork_is_named(box: Sandbox) -> None:
    skip_unless(box, "pids")
    outcome = await sh(box, "for i in $(seq 60); do sleep 30 & done", timeout_s=10)
    assert outcome.reason is Reason.PIDS


async def test_a_full_process_table_is_an_outcome_of_the_next_command_too(box: Sandbox) -> None:
    skip_unless(box, "pids")
    fill = """
import os, time
try:
    while os.fork(): pass
except BlockingIOError:
    open("full", "w").close()
time.sleep(60)
"""
    async with box.start(Command(argv=("python3", "-I", "-S", "-c", fill))):
        with anyio.fail_after(20):
            while True:
                try:
                    await box.read_file("full", 0)
                    break
                except TransferError:
                    await anyio.sleep(0.01)
        outcome = await sh(box, "true")
        assert (outcome.reason, outcome.exit_code) == (Reason.PIDS, 126)
        assert b"fork" in outcome.stderr
    assert (await sh(box, "true")).ok


async def test_cpu_time_over_is_a_timeout(box: Sandbox) -> None:
    outcome = await sh(box, "while :; do :; done", cpu_s=1)
    assert outcome.reason is Reason.TIMEOUT
    assert outcome.usage.cpu_s > 0.5


async def test_a_background_child_holds_nobody_up_and_lives_on(box: Sandbox) -> None:
    started_s = time.monotonic()
    outcome = await sh(box, "sleep 61 & echo ok")
    assert outcome.ok
    assert outcome.stdout == b"ok\n"
    assert time.monotonic() - started_s < 5
    assert await names(box) == [b"sleep"]
    assert (await sh(box, "kill %1 2>/dev/null; true")).ok
    assert await names(box) == [b"sleep"]


async def test_a_timeout_kills_all_that_its_command_started_and_nothing_else(box: Sandbox) -> None:
    await sh(box, "sleep 62 &")
    await sh(box, "(setsid sleep 63 &) ; sleep 64 & setsid sh -c 'sleep 65' & sleep 66", timeout_s=0.3)
    assert await names(box) == [b"sleep"]


async def test_cancelling_a_run_kills_what_it_started(box: Sandbox) -> None:
    with anyio.move_on_after(0.2) as scope:
        await sh(box, "(setsid sleep 63 &) ; sleep 64")
    assert scope.cancelled_caught
    assert await names(box) == []


async def test_a_kill_that_comes_at_once_is_not_lost(box: Sandbox) -> None:
    for _ in range(10):
        async with box.start(Command(argv=("sleep", "67"))) as process:
            await process.kill()
            assert (await process.wait()).reason is Reason.KILLED
    assert await names(box) == []


async def test_a_flood_is_cut_with_bounded_memory(box: Sandbox) -> None:
    outcome = await box.run(Command(argv=("yes",), output_limit_bytes=1000, timeout_s=20))
    assert outcome.reason is Reason.OUTPUT_LIMIT
    assert len(outcome.stdout) == 1000
    assert 1 * MIB - 1000 <= outcome.stdout_truncated_bytes < 3 * MIB
    big = await box.run(Command(argv=("head", "-c", "20000000", "/dev/zero"), output_limit_bytes=1 * MIB))
    assert big.ok
    assert len(big.stdout) + big.stdout_truncated_bytes == 20_000_000


async def test_bytes_come_back_as_they_were(box: Sandbox) -> None:
    data = os.urandom(300_000)
    assert (await box.run(Command(argv=("cat",), stdin=data))).stdout == data
    text = "é".encode() * 100
    slow = "import os, sys, time\nfor byte in sys.stdin.buffer.read(): os.write(1, bytes([byte]))"
    assert (await box.run(Command(argv=("python3", "-I", "-S", "-c", slow), stdin=text))).stdout == text


async def test_commands_run_at_once_and_share_the_workspace(box: Sandbox) -> None:
    outcomes: list[Outcome] = []

    async def one(number: int) -> None:
        outcomes.append(await sh(box, f"echo {number} >> all; while [ $(wc -l < all) -lt 4 ]; do sleep 0.01; done"))

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(one, number)
    assert all(outcome.ok for outcome in outcomes)


async def test_passed_descriptors_become_the_childs_own_and_no_other_is_open(box: Sandbox) -> None:
    pipes = [os.pipe() for _ in range(4)]  # for 0, 1, 2 and 3
    os.write(pipes[0][1], b"in")
    os.close(pipes[0][1])
    fds = [pipes[0][0], *(pipe[1] for pipe in pipes[1:])]
    async with box.start(Command(argv=("sh", "-c", "cat >&3; ls /proc/self/fd")), fds=fds) as process:
        for fd in fds:
            os.close(fd)
        outcome = await process.wait()
    assert outcome.ok
    assert outcome.stdout == outcome.stderr == b""
    assert os.read(pipes[3][0], 100) == b"in"
    assert os.read(pipes[1][0], 100).split() == [b"0", b"1", b"2", b"3", b"4"]  # 4 is the directory itself
    for read_end, _ in pipes[1:]:
        os.close(read_end)


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
    try: print("open", path, os.listdir(path) if os.path.isdir(path) else open(path).read())
    except OSError: pass
try: os.unshare
except AttributeError: pass
"""
    outcome = await box.run(Command(argv=("python3", "-I", "-S", "-c", script)))
    assert outcome.stdout.split() == [b"EAFNOSUPPORT"] * 3 + [b"ENETUNREACH", b"loopback"], outcome.stderr
    for forbidden in ("mount -t tmpfs x /tmp", "unshare -U true", "touch /usr/x", "touch /x", "cat /dev/mem"):
        assert not (await sh(box, forbidden)).ok, forbidden
    assert (await sh(box, "kill -9 1; kill -STOP 1; echo $?")).ok
    assert b"CapEff:\t0000000000000000" in (await sh(box, "cat /proc/self/status")).stdout


async def test_closing_a_sandbox_ends_its_commands_as_killed(host: SandboxHost, small: SandboxSpec) -> None:
    outcomes: list[Outcome] = []
    async with anyio.create_task_group() as group:
        async with host.acquire(small) as box:
            running = anyio.Event()

            async def long() -> None:
                async with box.start(Command(argv=("sleep", "60"))) as process:
                    running.set()
                    outcomes.append(await process.wait())

            group.start_soon(long)
            await running.wait()
    assert [outcome.reason for outcome in outcomes] == [Reason.KILLED]
    with pytest.raises(SandboxDiedError):
        await sh(box, "true")


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
