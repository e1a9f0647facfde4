"""Starts from a large process: does a sandbox cost more when the engine's process is big, and does its loop stall?

Owns the ballast. Invariants: lean and heavy batches take turns in one process, so that both see the same machine; the
ballast is really resident, in small pages, which is the worst case for whoever copies page tables.
"""

from __future__ import annotations

import mmap
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
import anyio.to_thread
import numpy as np

from bench.lag import LagProbe
from bench.machine import available_bytes
from bench.peers import PROGRAM, run_bare
from bench.records import Measure, Skipped, claim
from bench.rounds import Batch, Operation, interleave, ratio, timed
from bench.runner import Findings
from sandbox.types import GIB, MIB

_NEEDED = 2
"""Times the ballast must be available: it must never push other programs out of memory."""
_PAGE = mmap.PAGESIZE
_STALL_MS = 5.0
_RATIO = 1.2
_OUR_START = "ours: create to first result"
_BARE = "bare asyncio subprocess"


class _Watched:
    """A peer whose batches run with or without ballast, one operation at a time, under a lag probe."""

    def __init__(self, name: str, operation: Operation, ballast_bytes: int) -> None:
        self.name = name
        self._operation = operation
        self._ballast_bytes = ballast_bytes
        self.worst_stalls_s: list[float] = []
        """The largest of each batch, the first one included."""
        self.num_long = 0
        """Stalls of all batches that were longer than a claim allows."""

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """One batch; the ballast is there before it begins and gone after it."""
        with ballast(self._ballast_bytes):
            await anyio.sleep(0.01)
            with LagProbe() as probe:
                batch = await timed(self._operation, concurrency, slice_s)
                await anyio.sleep(0.01)
        self.worst_stalls_s.append(max(probe.stalls_s))
        self.num_long += sum(1e3 * stall_s > _STALL_MS for stall_s in probe.stalls_s)
        return batch

    def stall_measure(self, condition: str) -> Measure:
        """The row of the largest stall in each round."""
        worst_ms = [1e3 * stall_s for stall_s in self.worst_stalls_s[1:]]
        return Measure(
            name=f"loop stall: {self.name}",
            condition=condition,
            unit="ms",
            p50=statistics.median(worst_ms),
            p99=max(worst_ms),
            per_second=None,
            n=len(worst_ms),
        )


async def measure(start: Operation, ballast_bytes: int, rounds: int, slice_s: float) -> Findings:
    """Compares lean and heavy starts. `start` returns the seconds to its first result.

    Skips, with the reason, where less than twice the ballast is available.
    """
    size = _spoken(ballast_bytes)
    ratio_name = f"create to first result with {size} resident / without, p50"
    stall_name = f"largest event-loop stall from starts with {size} resident, median over rounds"
    available = available_bytes()
    if available < _NEEDED * ballast_bytes:
        needed, there = _spoken(_NEEDED * ballast_bytes), _spoken(available)
        reason = f"needs {needed} of available memory, here are {there}"
        return Findings(
            skipped=[Skipped(name=f"{size} resident", reason=reason)],
            claims=[claim(ratio_name, None, "x", "<=", _RATIO), claim(stall_name, None, "ms", "<=", _STALL_MS)],
        )
    condition = f"with and without {size} resident in the engine's process"
    variants = ((", without", 0), (", with", ballast_bytes))
    lean, heavy = (_Watched(_OUR_START + words, start, nbytes) for words, nbytes in variants)
    bare, bare_heavy = (_Watched(_BARE + words, _bare, nbytes) for words, nbytes in variants)
    quiet = _Watched("nothing", _nothing, 0)
    peers = (lean, heavy, bare, bare_heavy, quiet)
    series = await interleave(peers, concurrency=1, rounds=rounds, slice_s=slice_s, condition=condition)
    for peer in (lean, heavy):
        series[peer.name] = series[peer.name].inner(peer.name)
    timings = [series[peer.name].measure(rate=False) for peer in peers[:4]]
    stalls = [peer.stall_measure(condition) for peer in peers]
    return Findings(
        measures=timings + stalls,
        claims=[
            claim(ratio_name, ratio(series[heavy.name], series[lean.name]), "x", "<=", _RATIO),
            claim(stall_name, stalls[1].p50, "ms", "<=", _STALL_MS),
        ],
        notes=_notes(peers),
    )


def _notes(peers: Sequence[_Watched]) -> list[str]:
    long = ", ".join(f"{peer.num_long} ({peer.name})" for peer in peers)
    return [
        "a stall is how late a 1 ms heartbeat on the loop came, less what the loop's thread waited for a CPU while "
        "other processes had it; its p50 is the median over rounds of the largest in a round, its p99 the largest of "
        f"all; stalls over {_STALL_MS:g} ms: {long}"
    ]


async def _bare(worker: int) -> None:
    await run_bare((PROGRAM,))


async def _nothing(worker: int) -> None:
    await anyio.sleep(0.05)


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


def _spoken(nbytes: int) -> str:
    return f"{nbytes / GIB:.3g} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
