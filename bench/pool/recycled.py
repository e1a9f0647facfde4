"""Our pool as a peer: acquire, run a command, release; and the acquire alone.

Owns the pool of one condition. Invariants: a batch is over only when every jail that it used is clean again, so that
recycling is part of its time; an acquire that is timed alone finds the pool at rest.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec

from bench.peers.ours import run_command
from bench.pool.bases import require_base
from bench.records import CannotMeasure
from bench.rounds import Batch, timed
from sandbox.host import SandboxHost
from sandbox.layers.types import Layer
from sandbox.pool.config import PoolConfig, Warm
from sandbox.pool.pool import SandboxPool
from sandbox.pool.statistics import PoolStatistics
from sandbox.types import SandboxSpec

RECYCLED = "ours: acquire, command, release (recycled)"
ACQUIRE = "ours: acquire alone, of these"
SPARE = 16
"""Jails beyond the workers', so that the next acquire need not wait for the last jail's cleaning."""
_READY_S = 60.0
_LOOK_S = 0.0005


class Recycled:
    """The peer; its inner times are those of the acquires. Made by `open_recycled`."""

    name = RECYCLED

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool
        self._spec = SandboxSpec()

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """One batch, with the cleaning after the last release."""
        began = time.perf_counter()
        batch = await timed(self._operate, concurrency, slice_s)
        await self.rest()
        return msgspec.structs.replace(batch, wall_s=time.perf_counter() - began)

    async def _operate(self, worker: int) -> float:
        began = time.perf_counter()
        async with self.pool.acquire(self._spec) as box:
            acquired_s = time.perf_counter() - began
            await run_command(box)
        return acquired_s

    async def rest(self, num_warm: int = 0) -> None:
        """Returns when no jail is being cleaned, ended or built, and so many are warm.

        Raises:
            CannotMeasure: that takes a minute.
        """
        deadline = time.monotonic() + _READY_S
        while (now := self.pool.statistics()).resetting or now.ending or now.building or now.warm < num_warm:
            if time.monotonic() > deadline:
                raise CannotMeasure(f"the pool does not come to rest: {now}")
            await anyio.sleep(_LOOK_S)

    def account(self) -> PoolStatistics:
        """What the pool has done."""
        return self.pool.statistics()


class WarmAcquire:
    """One acquire at a time from a pool at rest, over the given bases in turn; each is followed by a command.

    A single base is attached from the second acquire on.
    """

    def __init__(self, name: str, recycled: Recycled, bases: Sequence[Layer | None] = (None,)) -> None:
        self.name = name
        self._recycled = recycled
        self._spec = SandboxSpec()
        self._bases = itertools.cycle(bases)
        self._command = run_command if bases[0] is None else require_base

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """As many as fit; the samples are the acquires alone."""
        samples_s: list[float] = []
        began = time.perf_counter()
        while not samples_s or time.perf_counter() - began < slice_s:
            samples_s.append(await self._acquire(next(self._bases)))
        return Batch(samples_s=samples_s, wall_s=time.perf_counter() - began)

    async def _acquire(self, base: Layer | None) -> float:
        start = time.perf_counter()
        async with self._recycled.pool.acquire(self._spec, base) as box:
            took_s = time.perf_counter() - start
            await self._command(box)
        await self._recycled.rest()
        return took_s


@asynccontextmanager
async def open_recycled(host: SandboxHost, number: int) -> AsyncIterator[Recycled]:
    """A pool of that many jails, all warm."""
    config = PoolConfig(max_leased=number, max_jails=number, warm=(Warm(count=number),))
    async with SandboxPool.start(host, config) as pool:
        recycled = Recycled(pool)
        await recycled.rest(number)
        yield recycled
