"""What a host does beside its jails: it holds nothing longer than it needs, and blocks nobody."""

from __future__ import annotations

import io
import os
import signal
import tarfile
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from sandbox import builder
from sandbox import host as host_module
from sandbox.cgroup.probe import BackendName
from sandbox.errors import CapabilityError, ConfigError
from sandbox.estate.state import claim_slot
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.images.resolve import resolve_image
from sandbox.protocol.wire import Kind, Tag, encode, number
from sandbox.types import JailName, SandboxSpec
from tests.sandbox.children import children_of

pytestmark = pytest.mark.anyio


async def test_an_image_is_resolved_off_the_loop_until_it_is_known(
    host: SandboxHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[bool] = []

    def resolve(*args: Any, **named: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return resolve_image(*args, **named)

    monkeypatch.setattr(builder, "resolve_image", resolve)
    for _ in range(2):
        async with host.acquire(SandboxSpec(image="host")):
            pass
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be read as a directory"):
            async with host.acquire(SandboxSpec(image="/nonexistent")):
                pass
    assert on_loop == [False, True, False, False]


async def test_an_engine_that_falls_back_to_a_shared_uid_gives_back_its_block(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Claim:
        block, uids, closed = 0, range(0), False

        def close(self) -> None:
            self.closed = True

    class Ids:
        first_uid, count = 100_000, 65_536

    def closed_place(path: Path) -> None:
        raise CapabilityError(f"{path} is closed to others", "open it")

    async def opened(*_: object) -> None:
        """A warden that needs no uids."""

    claim = Claim()
    monkeypatch.setattr(host_module, "find_subordinate_ids", Ids)
    monkeypatch.setattr(host_module, "claim_uids", lambda *_: claim)
    monkeypatch.setattr(host_module, "inner_uids", lambda *_: range(1, 2))
    monkeypatch.setattr(host_module, "require_open", closed_place)
    slot = claim_slot(state_dir, 1)
    host = SandboxHost(SandboxConfig(), state_dir, slot)
    host._root = False
    monkeypatch.setattr(host._warden, "open", opened)
    await host._open_warden(Path("/nonexistent"))
    slot.close()
    assert claim.closed
    assert host._claim is None
    assert "is closed to others" in host.shared_uid


async def test_killing_a_command_that_has_ended_leaves_transfers_alone(state_dir: Path, jail: JailName) -> None:
    """Without control groups what nobody keeps is killed with it; a transfer is the agent's own."""
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("f"))
    reading, writing = os.pipe()
    async with SandboxHost.start(config) as host, host.acquire(SandboxSpec(jail=jail)) as box:

        async def upload() -> None:
            with os.fdopen(reading, "rb") as pipe:
                assert (await box.upload_tar(pipe)).num_files == 1

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(upload)
                for _ in range(5_000):
                    if (await box.usage()).pids:  # the helper runs
                        break
                    await anyio.sleep(0.001)
                box._link.post(encode(Kind.KILL, 999_999, [number(Tag.KEEPER, 1)]))
                await box.usage()  # answered when that is done
                with os.fdopen(writing, "wb") as pipe:
                    pipe.write(buffer.getvalue())


@pytest.mark.parametrize("backend", ["auto", "none"])
async def test_a_closed_sandbox_leaves_no_process_not_even_a_dead_one(
    state_dir: Path, jail: JailName, backend: BackendName
) -> None:
    """Also when it had died before: the kernel says that an agent is dead before its number is free."""
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir), cgroup_backend=backend)) as host:
        warden = host._warden.pid
        for index in range(30):
            async with host.acquire(SandboxSpec(jail=jail)) as box:
                if index % 2:
                    (agent,) = children_of(warden)
                    os.kill(int(agent), signal.SIGKILL)
            assert children_of(warden) == []
            assert box.alive is False
