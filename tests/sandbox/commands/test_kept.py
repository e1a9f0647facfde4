"""Streams that background children keep: read and thrown away, slowly, and never more than a few."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import pytest

from sandbox.commands.kept import MAX_KEPT, READS_PER_S, KeptStreams, Pace
from sandbox.commands.streams import READ_BYTES
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, JailName, SandboxSpec
from tests.sandbox.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        yield box


async def test_a_server_in_the_background_may_log_more_than_a_pipe_holds(box: Sandbox) -> None:
    script = (
        "(sleep 0.3; i=0; while [ $i -lt 300 ]; do head -c 1000 /dev/zero; i=$((i+1)); done; echo done > end) & echo ok"
    )
    assert (await box.run(Command(argv=("sh", "-c", script)))).stdout == b"ok\n"
    waiting = Command(argv=("sh", "-c", "while ! [ -e end ]; do sleep 0.05; done"), timeout_s=40)
    assert (await box.run(waiting)).ok


async def test_endless_output_in_the_background_costs_the_loop_next_to_nothing(box: Sandbox) -> None:
    for _ in range(4):
        await box.run(Command(argv=("sh", "-c", "yes & echo ok")))
    await anyio.sleep(0.2)
    cpu_s, wall_s = time.process_time(), time.monotonic()
    await anyio.sleep(1.5)
    assert time.process_time() - cpu_s < 0.15 * (time.monotonic() - wall_s)


async def test_what_always_comes_is_read_more_and_more_seldom_until_it_rests() -> None:
    reading, writing = os.pipe2(os.O_NONBLOCK)
    kept = KeptStreams(Pace())
    kept.add([reading])
    num_filled = 0
    until_s = time.monotonic() + 0.6
    while time.monotonic() < until_s:
        with suppress(BlockingIOError):
            os.write(writing, bytes(READ_BYTES))
            num_filled += 1
        await anyio.sleep(0.002)
    assert 1 < num_filled < 8
    assert kept._pause_s[reading] > 0.15

    def rests() -> bool:
        with suppress(BlockingIOError):
            os.write(writing, b"x")
        return kept._pause_s[reading] < 0.1

    await until(rests)
    kept.close()
    os.close(writing)


async def test_streams_are_bounded_in_number_and_closed_at_the_end() -> None:
    kept = KeptStreams(Pace())
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(MAX_KEPT + 5)]
    kept.add([reading for reading, _ in pipes])
    for _, writing in pipes[:5]:
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"x")
    for _, writing in pipes[5:]:
        os.write(writing, b"x")
    os.close(pipes[-1][1])
    for _ in range(1000):
        if len(kept._pauses) < MAX_KEPT:
            break
        await anyio.sleep(0.01)
    assert len(kept._pauses) == MAX_KEPT - 1, "a stream whose writers are gone is closed"
    kept.close()
    kept.close()
    for _, writing in pipes[:-1]:
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"x")
        os.close(writing)


def test_however_many_streams_there_are_they_are_read_at_one_pace() -> None:
    pace = Pace()
    pauses_s = [pace.pause_s(100.0, 0.05) for _ in range(4096)]
    assert pauses_s[0] == pytest.approx(0.05)
    assert pauses_s[-1] == pytest.approx(4095 / READS_PER_S)
    assert pace.pause_s(1000.0, 0.05) == pytest.approx(0.05)
