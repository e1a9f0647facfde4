"""Live usage: what a sandbox holds is told while it holds it, and nothing of an earlier tenant's."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from sandbox.errors import SandboxDiedError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, Reason, SandboxSpec

pytestmark = pytest.mark.anyio
LIMITS = Limits(memory_bytes=128 * MIB, disk_bytes=32 * MIB, pids=24)


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(jail=jail, limits=LIMITS)) as box:
        yield box


def shell(script: str) -> Command:
    return Command(argv=("sh", "-c", script))


async def test_files_processes_and_commands_are_counted(box: Sandbox) -> None:
    before = await box.usage()
    assert (before.pids, before.num_running) == (0, 0)
    await box.write_file("f", bytes(5 * MIB))
    async with box.start(shell("sleep 61 & sleep 62 & echo up; wait"), output="stream") as process:
        await anext(process.output())
        during = await box.usage()
    assert during.num_running == 1
    assert during.pids is not None
    assert during.pids >= 3
    assert during.disk_bytes is not None
    assert before.disk_bytes is not None
    assert 5 * MIB <= during.disk_bytes - before.disk_bytes < 6 * MIB
    assert during.inodes is not None
    assert before.inodes is not None
    assert during.inodes - before.inodes == 1
    after = await box.usage()
    assert (after.pids, after.num_running) == (0, 0)


async def test_memory_and_cpu_time_are_the_whole_sandboxs(box: Sandbox) -> None:
    if "memory" in box.unenforced:
        pytest.skip("this host has no cgroups")
    hog = "x = bytearray(60 * 2**20); print('up', flush=True); input()"
    async with box.start(Command(argv=("python3", "-I", "-S", "-c", hog)), stdin="pipe", output="stream") as process:
        await anext(process.output())
        during = await box.usage()
    assert during.memory_bytes is not None
    assert 60 * MIB < during.memory_bytes < 160 * MIB
    await box.run(shell("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"))
    after = await box.usage()
    assert after.memory_bytes is not None
    assert after.memory_bytes < 40 * MIB
    assert after.peak_memory_bytes is None or after.peak_memory_bytes >= 60 * MIB
    assert after.cpu_s is not None
    assert during.cpu_s is not None
    assert after.cpu_s > during.cpu_s + 0.05


async def test_a_new_tenant_starts_from_nothing(host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(jail=jail, limits=LIMITS)
    async with host.acquire(spec) as box:
        if "memory" in box.unenforced:
            pytest.skip("this host has no cgroups")
        await box.run(
            Command(argv=("python3", "-I", "-S", "-c", "x = bytearray(60 * 2**20)\nfor i in range(10**7): pass"))
        )
        first = await box.usage()
    async with host.acquire(spec) as box:
        second = await box.usage()
    assert first.cpu_s is not None
    assert second.cpu_s is not None
    assert second.cpu_s < first.cpu_s
    assert second.peak_memory_bytes is None or second.peak_memory_bytes < 40 * MIB


async def test_without_cgroups_it_says_what_the_agent_can_count_and_no_more(state_dir: Path, jail: JailName) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")) as host:
        async with host.acquire(SandboxSpec(jail=jail)) as box:
            assert (await box.usage()).pids == 0
            async with box.start(shell("sleep 61 & sleep 62 & echo up; wait"), output="stream") as process:
                await anext(process.output())
                seen = await box.usage()
    assert (seen.memory_bytes, seen.peak_memory_bytes, seen.cpu_s) == (None, None, None)
    assert seen.pids == 3
    assert seen.disk_bytes is not None


async def test_a_sandbox_that_has_ended_has_no_usage(host: SandboxHost, jail: JailName) -> None:
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        pass
    with pytest.raises(SandboxDiedError):
        await box.usage()


@pytest.mark.parametrize("cpu_s", [0.1, 0.35])
async def test_a_fraction_of_a_cpu_second_is_enforced_where_a_cgroup_counts(box: Sandbox, cpu_s: float) -> None:
    if "cpus" in box.unenforced:
        pytest.skip("this host has no cgroups")
    with anyio.fail_after(30):
        outcome = await box.run(Command(argv=("sh", "-c", "while :; do :; done"), cpu_s=cpu_s))
        assert outcome.reason is Reason.TIMEOUT
        assert cpu_s <= outcome.usage.cpu_s
        assert outcome.signal == signal.SIGKILL, "ended by us, and not by the kernel, which counts whole seconds"
        asleep = await box.run(Command(argv=("sleep", "0.5"), cpu_s=cpu_s))
        assert asleep.ok


HOG = "until [ -e go ]; do sleep 0.02; done; python3 -I -S -c 'x = b\"1\" * 10**9'; code=$?; touch died; exit $code"
PLAIN = "touch go; until [ -e died ]; do sleep 0.02; done; exit 3"


async def test_a_plain_failure_beside_a_hog_is_no_oom(box: Sandbox) -> None:
    if "memory" in box.unenforced:
        pytest.skip("this host has no cgroups")
    for order in ((HOG, PLAIN), (PLAIN, HOG)):
        with anyio.fail_after(60):
            async with box.start(shell(order[0])) as first, box.start(shell(order[1])) as second:
                outcomes = dict(zip(order, (await first.wait(), await second.wait()), strict=True))
        assert (outcomes[HOG].reason, outcomes[HOG].usage.oom_kills) == (Reason.OOM, 1)
        assert (outcomes[PLAIN].reason, outcomes[PLAIN].exit_code) == (Reason.EXIT, 3)
        assert outcomes[PLAIN].usage.oom_kills == 0
        await box.run(shell("rm go died"))


async def test_a_plain_failure_after_a_hog_was_left_in_the_background_is_no_oom(box: Sandbox) -> None:
    if "memory" in box.unenforced:
        pytest.skip("this host has no cgroups")
    for _ in range(3):
        assert (await box.run(shell(f"({HOG}) & exit 0"))).ok
        outcome = await box.run(shell(PLAIN))
        assert (outcome.reason, outcome.exit_code, outcome.usage.oom_kills) == (Reason.EXIT, 3, 0)
        await box.run(shell("rm go died"))


async def test_more_commands_at_once_than_there_are_memory_accounts_all_run_under_the_limit(box: Sandbox) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(box.start(shell("sleep 60")))
        outcome = await box.run(Command(argv=("python3", "-I", "-S", "-c", "x = b'1' * 10**9")))
    if "memory" not in box.unenforced:
        assert outcome.reason is Reason.OOM
    assert (await box.run(shell("echo fine"))).stdout == b"fine\n"
