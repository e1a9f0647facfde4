"""Frames that break the format: they end at most the sandbox that gets them."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import anyio
import pytest

from sandbox.errors import ConfigError, SandboxError
from sandbox.host import SandboxHost
from sandbox.protocol.wire import Kind, Tag, encode, number, text
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, SandboxSpec

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


async def test_frames_of_nonsense_end_at_most_the_sandbox_that_gets_them(host: SandboxHost, spec: SandboxSpec) -> None:
    chance = random.Random(3)
    for _ in range(8):
        async with host.acquire(spec) as box:
            with anyio.fail_after(30):
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


async def test_a_path_that_no_kernel_takes_is_the_callers_mistake(box: Sandbox) -> None:
    path = "d/" * 100_000
    with pytest.raises(ConfigError, match=r"path .* is 200011 bytes long; at most 4095"):
        await box.write_file(path, b"")
    with pytest.raises(ConfigError, match="at most 4095"):
        await box.read_file("é" * 2048, 100)
    assert await sh(box, "echo fine") == b"fine\n"
