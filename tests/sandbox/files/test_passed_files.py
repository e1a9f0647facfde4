"""A file that the agent passes is believed as far as its own fstat goes, and never waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from sandbox.errors import TransferError
from sandbox.files.transfer import read_all, read_passed
from sandbox.host import SandboxHost
from sandbox.protocol.wire import Kind, decode, encode
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, JailName, SandboxSpec

pytestmark = pytest.mark.anyio


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        yield box


async def test_a_descriptor_of_hostile_making_is_one_fault_and_blocks_nobody(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    os.mkfifo(tmp_path / "fifo")
    pipes = os.pipe()
    hostile = {
        "fifo": os.open(tmp_path / "fifo", os.O_RDWR),
        "pipe": os.dup(pipes[0]),
        "device": os.open("/dev/zero", os.O_RDONLY),
        "directory": os.open(tmp_path, os.O_RDONLY),
        "write only": os.open(path, os.O_WRONLY),
        "path only": os.open(path, os.O_PATH),
        "socket": socket.socket().detach(),
    }
    opened = decode(encode(Kind.OPENED, 1))
    with anyio.fail_after(10):
        for fd in hostile.values():
            with pytest.raises(TransferError):
                await read_passed("f", opened, [fd], MIB)
        good = os.open(path, os.O_RDONLY)
        for fds in ((), (good, hostile["fifo"])):
            with pytest.raises(TransferError):
                await read_passed("f", opened, fds, MIB)
        assert await read_passed("f", opened, [good], 100) == b"x" * 100
    for fd in (*hostile.values(), *pipes, good):
        os.close(fd)


def test_a_file_that_shrinks_while_it_is_read_comes_as_far_as_it_goes(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb+") as file:
        file.write(b"x" * 1000)
        file.flush()
        assert read_all(file.fileno(), 5000) == b"x" * 1000
        file.truncate(10)
        assert read_all(file.fileno(), 1000) == b"x" * 10


async def test_a_read_that_is_cancelled_as_its_answer_comes_leaves_no_descriptor(box: Sandbox) -> None:
    await box.write_file("f", b"x")
    await box.read_file("f", 10)
    before = len(os.listdir("/proc/self/fd"))
    for attempt in range(200):
        with anyio.move_on_after(0.00001 * attempt):
            await box.read_file("f", 10)
    await box.read_file("f", 10)
    assert len(os.listdir("/proc/self/fd")) == before
