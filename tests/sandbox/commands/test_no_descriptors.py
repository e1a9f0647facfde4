"""An engine that has no descriptor left for a while: limits still hold, and no sandbox is said to be dead."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import anyio
import pytest

from sandbox.cgroup import files
from sandbox.errors import SandboxDiedError, SandboxError
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, JailName, Reason, SandboxSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        yield box


@contextmanager
def no_descriptors() -> Iterator[None]:
    """None can be opened in here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_timeout_still_kills_everything(box: Sandbox) -> None:
    script = "setsid sleep 300 & exec sleep 300"
    async with box.start(Command(argv=("sh", "-c", script), timeout_s=0.3)) as process:
        with no_descriptors():
            await anyio.sleep(0.5)
        with anyio.fail_after(8):
            assert (await process.wait()).reason is Reason.TIMEOUT
        assert process.leaf is None or not files.populated(process.leaf)
    assert (await box.run(Command(argv=("true",)))).ok


async def test_a_limit_on_cpu_time_is_looked_at_again(box: Sandbox) -> None:
    if "cpus" in box.unenforced:
        pytest.skip("environment: this host has no cgroups")
    async with box.start(Command(argv=("sh", "-c", "while :; do :; done"), cpu_s=0.1)) as process:
        with no_descriptors():
            await anyio.sleep(0.3)
        with anyio.fail_after(20):
            outcome = await process.wait()
    assert (outcome.reason, outcome.signal) == (Reason.TIMEOUT, signal.SIGKILL)


async def test_what_cannot_be_read_now_can_be_asked_again_of_a_live_sandbox(box: Sandbox) -> None:
    if "memory" in box.unenforced:
        pytest.skip("environment: this host has no cgroups")
    async with box.start(Command(argv=("true",))) as process:
        with no_descriptors():
            for ask in (process.wait, box.usage):
                with pytest.raises(SandboxError) as caught:
                    await ask()
                assert not isinstance(caught.value, SandboxDiedError)
            with pytest.raises(SandboxError) as caught:
                await box.run(Command(argv=("true",)))
            assert not isinstance(caught.value, SandboxDiedError)
        assert box.alive
        assert (await process.wait()).ok
    assert (await box.usage()).num_running == 0
    assert (await box.run(Command(argv=("true",)))).ok


async def test_a_signal_of_its_own_choice_is_no_timeout(box: Sandbox) -> None:
    outcome = await box.run(Command(argv=("sh", "-c", "kill -XCPU $$"), cpu_s=100))
    assert outcome.reason is Reason.SIGNAL


async def test_leaves_do_not_become_more_while_one_command_always_runs(box: Sandbox) -> None:
    directory = box._cgroups.freezer()
    if directory is None:
        pytest.skip("environment: this user has no cgroup v2 tree")
    async with box.start(Command(argv=("sleep", "300"))):
        for _ in range(12):
            await box.run(Command(argv=("sh", "-c", "sleep 0.01 > /dev/null 2>&1 &")))
            await anyio.sleep(0.03)
        assert sum(name.startswith("c") for _, folders, _ in os.walk(directory) for name in folders) < 9
