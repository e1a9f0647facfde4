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

from bench.records import CannotMeasure, Measure

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
    peers: Sequence[Peer],
    *,
    concurrency: int,
    rounds: int,
    slice_s: float,
    budget_s: float = 60.0,
    condition: str = "",
    others: Sequence[Peer] = (),
    lost: dict[str, str] | None = None,
) -> dict[str, Series]:
    """Runs all peers in each of `rounds` rounds, after one short batch each that does not count.

    On a busy machine the rounds end early, after two at least, once they have taken `budget_s`.

    Args:
        others: peers that may fail: one that does has no series, and its reason is noted in `lost`.

    Raises:
        CannotMeasure: one of `peers` failed.
    """
    condition = condition or f"concurrency {concurrency}"
    lost = {} if lost is None else lost
    series = {peer.name: Series(peer.name, condition) for peer in (*others, *peers)}

    async def batch(peer: Peer, concurrency: int, slice_s: float) -> Batch | None:
        if peer.name not in series:
            return None
        try:
            return await peer.batch(concurrency, slice_s)
        except* CannotMeasure as errors:
            if peer not in others:
                raise
            lost[peer.name] = first_words(errors)
            del series[peer.name]
        return None

    for peer in (*others, *peers):
        await batch(peer, 1, 0.0)
    began = time.monotonic()
    for number in range(rounds):
        if number >= _MIN_ROUNDS and time.monotonic() - began > budget_s:
            break
        everyone = (*others, *peers)
        turn = number % len(everyone)
        for peer in (*everyone[turn:], *everyone[:turn]):
            done = await batch(peer, concurrency, slice_s)
            if done is not None:
                series[peer.name].batches.append(done)
    return series


def first_words(error: BaseException) -> str:
    """The text of the first exception in a group of them: workers that fail together fail for the same reason."""
    return first_words(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else str(error)


def rate_ratio(subject: Series, base: Series) -> float:
    """Median over rounds of the quotient of the two rates."""
    pairs = zip(subject.rates, base.rates, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def ratio(subject: Series, base: Series) -> float:
    """Median over rounds of the quotient of the two medians."""
    pairs = zip(subject.medians_s, base.medians_s, strict=True)
    return statistics.median(ours / theirs for ours, theirs in pairs)


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The smallest sample that at least `fraction` of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
