"""A frozen sandbox stands still, keeps its deadlines, can be ended, and leaves nothing of it to the next one."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from sandbox.cgroup import files
from sandbox.commands.process import KILL_TIMEOUT_S
from sandbox.errors import CapabilityError, SandboxDiedError, SandboxFrozenError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, JailName, Reason, SandboxSpec
from tests.sandbox.waiting import until

pytestmark = pytest.mark.anyio
BUSY = Command(argv=("sh", "-c", "while :; do :; done"), timeout_s=60)
TRUE = Command(argv=("true",))


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    if host.backend.name == "none":
        pytest.skip("environment: this user has no cgroup v2 tree")
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        yield box


async def test_nothing_runs_while_frozen_and_everything_goes_on_after_thaw(box: Sandbox) -> None:
    async with box.start(BUSY) as process:

        def used_us() -> int:
            used = box._cgroups.read(process.leaf).cpu_us
            assert used is not None
            return used

        await until(lambda: used_us() > 0)
        await box.freeze()
        await box.freeze()
        assert box.frozen
        still = used_us()
        await anyio.sleep(0.05)
        assert used_us() == still
        await box.thaw()
        await box.thaw()
        assert not box.frozen
        await until(lambda: used_us() != still)
        assert (await box.run(TRUE)).ok


async def test_what_needs_an_answer_from_inside_is_refused_at_once(box: Sandbox) -> None:
    await box.freeze()
    with pytest.raises(SandboxFrozenError, match="thaw"):
        await box.run(TRUE)
    with pytest.raises(SandboxFrozenError):
        await box.write_file("/workspace/x", b"")
    with pytest.raises(SandboxFrozenError):
        await box.read_file("/workspace/x", 1)
    await box.thaw()
    assert (await box.run(TRUE)).ok


async def test_a_deadline_holds_while_frozen_and_its_kill_reaches_the_frozen(box: Sandbox) -> None:
    words = ("sh", "-c", "(setsid sleep 300 &); exec sleep 300")
    async with box.start(Command(argv=words, timeout_s=0.5)) as process:
        await box.freeze()
        started = time.monotonic()
        outcome = await process.wait()
        assert time.monotonic() - started < KILL_TIMEOUT_S / 2
        assert outcome.reason is Reason.TIMEOUT
        assert process.leaf is not None
        assert not files.populated(process.leaf)
    await box.thaw()
    assert (await box.run(TRUE)).ok


async def test_a_command_that_was_killed_before_it_could_begin_never_runs_on(box: Sandbox) -> None:
    """It may join its control group, and so stand still, only after that was frozen."""
    for _ in range(5):
        async with box.start(Command(argv=("sh", "-c", "(setsid sleep 300 &); exec sleep 300"))) as process:
            await box.freeze()
            await process.kill()
            assert (await process.wait()).reason is Reason.KILLED
        await box.thaw()
        assert (await box.run(TRUE)).ok
        await until(box._cgroups.idle)
    assert box._places._set_aside == {}


async def test_the_agent_goes_on_while_what_it_started_stands_still(box: Sandbox) -> None:
    async with box.start(Command(argv=("sleep", "300"), timeout_s=0.3)) as process:
        await box.freeze()
        await box.jail.ping()
        assert (await process.wait()).reason is Reason.TIMEOUT
        assert box.frozen
        await box.thaw()
    assert box._cgroups.idle()
    assert (await box.run(TRUE)).ok


async def test_closing_a_frozen_sandbox_ends_it_and_the_next_one_is_not_born_frozen(
    host: SandboxHost, jail: JailName
) -> None:
    if host.backend.name == "none":
        pytest.skip("environment: this user has no cgroup v2 tree")
    directories = []
    for _ in range(2):
        async with host.acquire(SandboxSpec(jail=jail)) as box, box.start(BUSY):
            await box.freeze()
            directories.append(box._cgroups.freezer())
            box.close()
            with pytest.raises(SandboxDiedError):
                await box.thaw()
    assert directories[0] == directories[1] or host.backend.name == "v2"
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        assert box._cgroups.freezer() in directories
        assert (await box.run(TRUE)).ok


async def test_a_cancelled_freeze_lets_everything_go_on(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    async with box.start(BUSY):
        with anyio.CancelScope() as scope:

            def is_still() -> bool:
                scope.cancel()
                return False

            monkeypatch.setattr(box._freezer, "_is_still", is_still)
            await box.freeze()
        assert scope.cancelled_caught
        assert not box.frozen
        assert (await box.run(TRUE)).ok


async def test_an_engine_that_ends_takes_its_frozen_sandboxes_with_it(state_dir: Path, jail: JailName) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        if host.backend.name == "none":
            pytest.skip("environment: this user has no cgroup v2 tree")
        async with anyio.create_task_group() as group:

            async def hold(ready: anyio.Event) -> None:
                async with host.acquire(SandboxSpec(jail=jail)) as box, box.start(BUSY):
                    await box.freeze()
                    ready.set()
                    await anyio.sleep_forever()

            for _ in range(2):
                ready = anyio.Event()
                group.start_soon(hold, ready)
                await ready.wait()
            await host._warden.aclose()
            assert not any(map(os.path.exists, host.backend.roots))
            group.cancel_scope.cancel()


async def test_without_cgroups_freezing_is_a_capability_error_with_a_remedy(state_dir: Path, jail: JailName) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")) as host:
        async with host.acquire(SandboxSpec(jail=jail)) as box:
            with pytest.raises(CapabilityError, match="cgroup v2"):
                await box.freeze()
            assert (await box.run(TRUE)).ok


async def test_leaves_of_commands_that_ended_with_their_sandbox_are_used_again(
    host: SandboxHost, jail: JailName
) -> None:
    """Closed while they run, or killed while frozen: the set's directories do not become more and more."""
    if host.backend.name == "none":
        pytest.skip("environment: this user has no cgroup v2 tree")
    counts = []
    for _ in range(4):
        async with host.acquire(SandboxSpec(jail=jail)) as box, box.start(BUSY), box.start(BUSY) as process:
            directory = box._cgroups.freezer()
            assert directory is not None
            counts.append(sum(len(folders) for _, folders, _ in os.walk(directory)))
            await box.freeze()
            await process.kill()
            box.close()
    assert counts[1:] == counts[:1] * 3
