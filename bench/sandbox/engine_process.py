"""A process with a sandbox host, an event loop and as much resident memory as an engine may have.

Run as `python -m bench.sandbox.engine_process BALLAST_BYTES [STATE_DIR]`; says `ready`, then answers each line of
stdin, `KIND SECONDS`, with one line of JSON (`Answer`). Invariant: the ballast is resident, in small pages, from before
`ready` to the end: the worst case for whoever copies page tables, and no memory comes or goes while something is
measured.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from bench.lag import LagProbe
from bench.peers.ours import cold
from bench.peers.programs import PROGRAM, run_bare
from bench.records import CannotMeasure
from bench.rounds import timed
from sandbox.errors import SandboxError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.loop import run_on_loop

READY = b"ready\n"
_PAGE = mmap.PAGESIZE


class Answer(msgspec.Struct, kw_only=True):
    """One batch."""

    samples_s: list[float] = []
    inner_s: list[float] = []
    wall_s: float = 0.0
    stalls_s: list[float] = []
    """See `bench.lag`."""
    error: str = ""
    """Why nothing was measured."""


@contextmanager
def ballast(nbytes: int) -> Iterator[None]:
    """Holds that much resident memory in this process; blocks while it is made."""
    if nbytes == 0:
        yield
        return
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        np.frombuffer(memory, np.uint8)[::_PAGE] = 1
        yield


async def _bare(worker: int) -> None:
    await run_bare((PROGRAM,))


async def _nothing(worker: int) -> None:
    await anyio.sleep(0.05)


async def _answer(host: SandboxHost, kind: str, slice_s: float) -> Answer:
    operation = {"start": cold(host), "bare": _bare, "nothing": _nothing}[kind]
    answer = Answer()
    try:
        await operation(0)  # some machines take back memory that was idle: the first one pays for all of it
        with LagProbe() as probe:
            batch = await timed(operation, 1, slice_s)
        answer = Answer(samples_s=batch.samples_s, inner_s=batch.inner_s, wall_s=batch.wall_s, stalls_s=probe.stalls_s)
    except* (CannotMeasure, SandboxError) as errors:
        answer.error = str(errors.exceptions[0])
    return answer


async def _serve(state_dir: str | None) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=state_dir)) as host:
        _say(READY)
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            kind, seconds = line.split()
            _say(msgspec.json.encode(await _answer(host, kind, float(seconds))) + b"\n")


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    with ballast(int(sys.argv[1])):
        run_on_loop(_serve, sys.argv[2] if len(sys.argv) > 2 else None)
