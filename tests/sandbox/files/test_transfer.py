"""Frames that break the format: they end at most the sandbox that gets them."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

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


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda box: box.write_file("a", "text"), "data"),
        (lambda box: box.write_file("a", None), "data"),
        (lambda box: box.write_file("a", b"", "644"), "mode"),
        (lambda box: box.write_file("a", b"", 0o10000), "mode"),
        (lambda box: box.write_file(None, b""), "path"),
        (lambda box: box.write_file("a\ud800", b""), "path"),
        (lambda box: box.read_file("a\0", 5), "path"),
        (lambda box: box.read_file("a", 1.5), "max_bytes"),
        (lambda box: box.download_tar(max_bytes=1.5), "max_bytes"),
        (lambda box: box.download_tar(max_bytes=1 << 70), "max_bytes"),
        (lambda box: box.download_tar(max_bytes=5, max_entries=1.5), "max_entries"),
        (lambda box: box.upload_tar(b"", max_entries=-1), "max_entries"),
    ],
)
async def test_a_wrong_argument_is_refused_by_its_name_and_costs_no_descriptor(
    host: SandboxHost, call: Callable[[Any], Awaitable[Any]], field: str
) -> None:
    async with host.acquire(SandboxSpec()) as box:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError) as refused:
            await call(box)
        assert refused.value.field == field
        assert len(os.listdir("/proc/self/fd")) == before
