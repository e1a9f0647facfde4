"""Files in and out: only regular ones, only inside, only as large as was agreed."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator

import anyio
import pytest

from sandbox.errors import SandboxError, TransferError
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, SandboxSpec
from sandbox.wire import Kind, Tag, encode, number, text

pytestmark = pytest.mark.anyio


@pytest.fixture
def spec(jail: JailName) -> SandboxSpec:
    return SandboxSpec(limits=Limits(disk_bytes=8 * MIB), jail=jail)


@pytest.fixture
async def box(host: SandboxHost, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    async with host.acquire(spec) as box:
        yield box


async def sh(box: Sandbox, script: str) -> bytes:
    outcome = await box.run(Command(argv=("sh", "-c", script)))
    assert outcome.ok, outcome
    return outcome.stdout


async def test_a_file_goes_in_with_its_mode_and_parents_and_comes_out_again(box: Sandbox) -> None:
    for size in (0, 1, 70_000, 3_000_000):
        data = os.urandom(size)
        await box.write_file("/workspace/a/b/file", data, mode=0o640)
        assert await box.read_file("/workspace/a/b/file", 4_000_000) == data
    assert await sh(box, "stat -c '%a %u' a/b/file") == b"640 1000\n"
    await box.write_file("relative.txt", b"x")
    assert await sh(box, "cat /workspace/relative.txt") == b"x"


async def test_what_is_no_regular_file_is_refused_in_both_directions(box: Sandbox) -> None:
    await sh(box, "ln -s /etc/passwd link; mkfifo fifo; mkdir dir; ln -s /proc/1 agent")
    for path in ("link", "fifo", "dir", "/dev/zero", "/dev/null", "agent/environ", "/proc/self/fd/3", "absent"):
        with pytest.raises(TransferError):
            await box.read_file(path, MIB)
    for path in ("link", "fifo", "dir", "/etc/x", "/dev/null", "/proc/self/fd/3"):
        with pytest.raises(TransferError):
            await box.write_file(path, b"x")
    assert await sh(box, "cat link | head -c 4") == b"root"


async def test_a_file_over_its_cap_is_refused_and_a_sparse_one_does_not_fill_memory(box: Sandbox) -> None:
    await sh(box, "truncate -s 60M sparse; head -c 2000 /dev/zero > small")
    with pytest.raises(TransferError, match="over the cap"):
        await box.read_file("sparse", MIB)
    with pytest.raises(TransferError, match="over the cap"):
        await box.read_file("small", 1999)
    assert await box.read_file("small", 2000) == bytes(2000)


async def test_an_upload_over_the_quota_fails_as_one_and_the_sandbox_lives(box: Sandbox) -> None:
    with pytest.raises(TransferError, match="No space") as caught:
        await box.write_file("big", bytes(10 * MIB))
    assert caught.value.error == 28
    await sh(box, "rm -f big")
    await box.write_file("fits", bytes(1 * MIB))


async def test_a_directory_swapped_for_a_link_during_uploads_never_leads_outside(box: Sandbox) -> None:
    swap = "while :; do mkdir -p d; rm -rf d; ln -s /etc d; rm -f d; done"
    async with box.start(Command(argv=("sh", "-c", swap), timeout_s=30)):
        for _ in range(40):
            try:
                await box.write_file("/workspace/d/passwd", b"owned")
            except TransferError:
                continue
    assert b"owned" not in await anyio.Path("/etc/passwd").read_bytes()


async def test_frames_of_nonsense_end_at_most_the_sandbox_that_gets_them(host: SandboxHost, spec: SandboxSpec) -> None:
    chance = random.Random(3)
    for _ in range(8):
        async with host.acquire(spec) as box:
            with anyio.move_on_after(10):
                try:
                    for _ in range(60):
                        items = [text(Tag.ARGV, "true"), text(Tag.PATH, "/workspace/x"), number(Tag.STDIO, 3)]
                        kind = chance.choice((Kind.RUN, Kind.KILL, Kind.PUT, Kind.GET))
                        data = bytearray(encode(kind, chance.randrange(1 << 31), items))
                        for _ in range(chance.randrange(4)):
                            data[chance.randrange(len(data))] = chance.randrange(256)
                        await box._link.send(bytes(data))
                    await box.run(Command(argv=("true",)))
                except SandboxError:
                    continue
    async with host.acquire(spec) as box:
        assert await sh(box, "echo fine") == b"fine\n"
