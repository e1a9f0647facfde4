"""A warm sandbox over a base: how long until it is handed out.

Owns the jail that is handed out again and again. Invariant: every base is a sealed workspace with the same number of
files, and what is timed is the lease alone; a command sees the base's files each time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.records import CannotMeasure
from bench.rounds import Batch
from sandbox.host import SandboxHost
from sandbox.jail import Jail
from sandbox.layers.types import Layer
from sandbox.types import Command, SandboxSpec

ATTACHED = "ours: warm lease, base attached"
NEW = "ours: warm lease, new base"
_FILL = "mkdir setup && cd setup && for i in $(seq {number}); do echo $i > $i; done"
_SPEC = SandboxSpec()


class BasedLease:
    """Leases one jail over the given bases in turn: one base is attached already from the second time on."""

    def __init__(self, name: str, host: SandboxHost, jail: Jail, bases: Sequence[Layer]) -> None:
        self.name = name
        self._host = host
        self._jail = jail
        self._bases = itertools.cycle(bases)

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """One lease after the other; the samples are the leases alone.

        Raises:
            CannotMeasure: a base was not there, or the jail was not clean afterwards.
        """
        samples_s: list[float] = []
        began = time.perf_counter()
        await self._lease(next(self._bases))  # another peer may have run since: does not count
        while not samples_s or time.perf_counter() - began < slice_s:
            samples_s.append(await self._lease(next(self._bases)))
        return Batch(samples_s=samples_s, wall_s=time.perf_counter() - began)

    async def _lease(self, base: Layer) -> float:
        start = time.perf_counter()
        box = await self._host.lease(self._jail, _SPEC, base)
        took_s = time.perf_counter() - start
        outcome = await box.run(Command(argv=("test", "-f", "/workspace/setup/1")))
        if not await self._host.reset(box):
            raise CannotMeasure(f"{self.name}: not clean: {self._jail.why_unclean}")
        if not outcome.ok:
            raise CannotMeasure(f"{self.name}: the base is not there: {outcome}")
        return took_s


@asynccontextmanager
async def open_based(host: SandboxHost, num_files: int) -> AsyncIterator[list[BasedLease]]:
    """The two peers, each with a jail of its own; the layers end with the host at the latest."""
    layers = [await _seal(host, num_files) for _ in range(3)]
    jails = [await host.build() for _ in range(2)]
    try:
        yield [BasedLease(ATTACHED, host, jails[0], layers[:1]), BasedLease(NEW, host, jails[1], layers[1:])]
    finally:
        for jail in jails:
            await host.destroy(jail)
        for layer in layers:
            await host.layers.release(layer)


async def _seal(host: SandboxHost, num_files: int) -> Layer:
    async with host.acquire(_SPEC) as box:
        outcome = await box.run(Command(argv=("sh", "-c", _FILL.format(number=num_files)), timeout_s=60))
        if not outcome.ok:
            raise CannotMeasure(f"no base could be set up: {outcome}")
        return await box.seal()
