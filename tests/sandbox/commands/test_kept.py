"""Streams that background children keep: read and thrown away, slowly, and never more than a few."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator

import anyio
import pytest

from sandbox.commands.kept import MAX_KEPT, KeptStreams
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, JailName, SandboxSpec

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


async def test_streams_are_bounded_in_number_and_closed_at_the_end() -> None:
    kept = KeptStreams()
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
