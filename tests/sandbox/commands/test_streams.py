"""Output is bounded whatever comes, and input never blocks."""

from __future__ import annotations

import os

import anyio
import anyio.lowlevel
import pytest

from sandbox.commands.streams import Drain, Feed


def pipe() -> tuple[int, int]:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    return ours, theirs


async def write_all(fd: int, data: bytes) -> None:
    def work() -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.close(fd)

    await anyio.to_thread.run_sync(work)


@pytest.mark.anyio
@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 300_000])
async def test_head_and_tail_are_kept_and_the_rest_is_counted(size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(size))
    ours, theirs = pipe()
    drain = Drain(ours, 100, 1 << 40, lambda: None)
    await write_all(theirs, data)
    await drain.ended.wait()
    kept, lost = drain.result()
    if size <= 100:
        assert (kept, lost) == (data, 0)
    else:
        assert kept == data[:50] + data[-50:]
        assert lost == size - 100


@pytest.mark.anyio
async def test_a_flood_is_told_once_and_memory_stays_bounded() -> None:
    told: list[int] = []
    ours, theirs = pipe()
    drain = Drain(ours, 1000, 100_000, lambda: told.append(1))
    await write_all(theirs, b"x" * 3_000_000)
    await drain.ended.wait()
    assert told == [1]
    assert len(drain._head) + len(drain._tail) < 200_000
    assert drain.total_bytes == 3_000_000


@pytest.mark.anyio
async def test_a_feed_writes_more_than_a_pipe_holds_and_survives_a_closed_reader() -> None:
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    Feed(ours, b"y" * 500_000)
    got = 0
    while True:
        part = await anyio.to_thread.run_sync(os.read, theirs, 65536)
        if not part:
            break
        got += len(part)
    os.close(theirs)
    assert got == 500_000
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    feed = Feed(ours, b"y" * 500_000)
    os.close(theirs)
    await anyio.lowlevel.checkpoint()
    feed.stop()
