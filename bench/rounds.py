"""Measures peers side by side: many short rounds, every peer in each, so that a noisy machine hits all alike.

Owns timing and statistics. Invariants: within a round each peer runs alone; the order turns from round to round;
a ratio compares two peers within each round before the median over rounds is taken, so that slow drift cancels.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
import msgspec

from bench.records import Measure

Operation = Callable[[int], Awaitable[float | None]]
"""One operation by the worker of that number; workers of a batch run at the same time. It may return the seconds after
which the part that matters was done."""


_MIN_ROUNDS = 2


class Batch(msgspec.Struct, kw_only=True):
    """What one peer did in one round."""

    samples_s: list[float]
    """Seconds of each operation."""
    wall_s: float
    """Of the whole batch, all workers together."""
    inner_s: list[float] = []
    """What the operations returned."""
    num_operations: int | None = None
    """Where a sample is not one operation: how many the batch did."""


class Peer(Protocol):
    """A subject that can be measured at any concurrency."""

    @property
    def name(self) -> str:
        """Its row in the table."""
        ...

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """Works for about `slice_s`, and at least one operation per worker."""
        ...


class Async:
    """A peer made of one asynchronous operation."""

    def __init__(self, name: str, operation: Operation) -> None:
        self._name = name
        self._operation = operation

    @property
    def name(self) -> str:
        """Its row in the table."""
        return self._name

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """`concurrency` workers, each one operation after the other until the slice is over."""
        return await timed(self._operation, concurrency, slice_s)


class Series:
    """All rounds of one peer under one condition."""

    def __init__(self, name: str, condition: str = "") -> None:
        self.name = name
        self.condition = condition
        self.batches: list[Batch] = []

    @property
    def samples_s(self) -> list[float]:
        """Every sample of every round."""
        return [sample for batch in self.batches for sample in batch.samples_s]

    @property
    def medians_s(self) -> list[float]:
        """Each round's median."""
        return [statistics.median(batch.samples_s) for batch in self.batches]

    @property
    def rates(self) -> list[float]:
        """Each round's operations per second."""
        return [(batch.num_operations or len(batch.samples_s)) / batch.wall_s for batch in self.batches]

    def inner(self, name: str) -> Series:
        """A row of its own for what the operations returned."""
        series = Series(name, self.condition)
        series.batches = [Batch(samples_s=batch.inner_s, wall_s=batch.wall_s) for batch in self.batches]
        return series

    def measure(self, *, rate: bool = True) -> Measure:
        """The row of the table, in milliseconds."""
        samples_s = self.samples_s
        return Measure(
            name=self.name,
            condition=self.condition,
            unit="ms",
            p50=1e3 * statistics.median(self.medians_s),
            p99=1e3 * percentile(samples_s, 0.99),
            per_second=statistics.median(self.rates) if rate else None,
            n=len(samples_s),
        )


async def timed(operation: Operation, concurrency: int, slice_s: float) -> Batch:
    """Runs one batch of an operation; each worker finishes what it has begun."""
    samples_s: list[float] = []
    inner_s: list[float] = []
    began = time.perf_counter()

    async def work(worker: int) -> None:
        while True:
            start = time.perf_counter()
            inner = await operation(worker)
            end = time.perf_counter()
            if inner is not None:
                inner_s.append(inner)
            samples_s.append(end - start)
            if end - began >= slice_s:
                return

    async with anyio.create_task_group() as group:
        for worker in range(concurrency):
            group.start_soon(work, worker)
    return Batch(samples_s=samples_s, wall_s=time.perf_counter() - began, inner_s=inner_s)


async def interleave(
    peers: Sequence[Peer], *, concurrency: int, rounds: int, slice_s: float, budget_s: float = 60.0, condition: str = ""
) -> dict[str, Series]:
    """Runs all peers in each of `rounds` rounds, after one short batch each that does not count.

    On a busy machine the rounds end early, after two at least, once they have taken `budget_s`.
    """
    condition = condition or f"concurrency {concurrency}"
    series = {peer.name: Series(peer.name, condition) for peer in peers}
    for peer in peers:
        await peer.batch(1, 0.0)
    began = time.monotonic()
    for number in range(rounds):
        if number >= _MIN_ROUNDS and time.monotonic() - began > budget_s:
            break
        turn = number % len(peers)
        for peer in (*peers[turn:], *peers[:turn]):
            series[peer.name].batches.append(await peer.batch(concurrency, slice_s))
    return series


def ratio(subject: Series, base: Series) -> float:
    """Median over rounds of the quotient of the two medians."""
    pairs = zip(subject.medians_s, base.medians_s, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least `fraction` of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
