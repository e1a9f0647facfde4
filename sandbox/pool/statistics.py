"""What a pool has done and holds.

Owns: the counters. Invariant: a snapshot is immutable and consistent: it is made in one step of the loop.
"""

from __future__ import annotations

import math

import msgspec

_FIRST_S = 1e-5
_PER_OCTAVE = 4
_NUM_BUCKETS = 1 + 28 * _PER_OCTAVE  # up to 45 minutes; the last one takes what is above


class WaitTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long the acquires that were served have waited, in seconds, from the call to the sandbox.

    Quantiles are upper bounds that are at most a fifth too high (buckets of a quarter octave).
    """

    count: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0
    p50_s: float = 0.0
    p90_s: float = 0.0
    p99_s: float = 0.0
    buckets: tuple[tuple[float, int], ...] = ()
    """Upper bound and number of waits, of each bucket that is not empty."""


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. Numbers of jails are of now, counts since the pool's start."""

    warm: int
    """Idle jails, ready to be leased."""
    leased: int
    resetting: int
    """Leases that have ended and whose jails are being cleaned."""
    building: int
    slow: int
    """Of `building`: those that take so long that others were started in their place."""
    ending: int
    """Jails that are being destroyed."""
    quarantined: int
    """Jails of which something could not be killed; their numbers, uids and control groups are not used again."""
    waiting: int
    """Acquires that wait for their turn or for a jail."""
    held_back_by: str
    """Why the first in the queue is not served: `leases`, `memory`, `pids`, `free memory`, `pressure`; else empty."""
    promised_memory_bytes: int
    promised_pids: int
    """Sum of the limits of all leases."""
    acquired: int
    """Acquires that got a sandbox."""
    warm_hits: int
    """Of those: without waiting for a jail to be built."""
    built: int
    recycled: int
    """Leases after which the jail was clean and is used again."""
    unclean: int
    """Leases after which the jail was not proven clean, and was destroyed."""
    died: int
    """Idle jails that were found dead."""
    shrunk: int
    """Idle jails that were destroyed because nobody wanted them, or to make room for others."""
    build_failures: int
    timeouts: int
    """Acquires that ended with `AcquireTimeoutError`."""
    refused: int
    """Acquires that ended with `PoolFullError`."""
    cancelled: int
    failed: int
    """Acquires that ended with another fault."""
    waits: WaitTimes


class Histogram:
    """Waits so far, in buckets a quarter octave wide."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._count = 0
        self._sum_s = 0.0
        self._max_s = 0.0

    def add(self, wait_s: float) -> None:
        """Counts one wait."""
        above = wait_s / _FIRST_S
        index = 0 if above <= 1 else min(_NUM_BUCKETS - 1, math.ceil(math.log2(above) * _PER_OCTAVE))
        self._counts[index] += 1
        self._count += 1
        self._sum_s += wait_s
        self._max_s = max(self._max_s, wait_s)

    def _quantile_s(self, share: float) -> float:
        wanted, seen = share * self._count, 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(_bound_s(index), self._max_s)
        return 0.0

    def snapshot(self) -> WaitTimes:
        """What was counted so far."""
        filled = tuple((_bound_s(index), count) for index, count in enumerate(self._counts) if count)
        return WaitTimes(
            count=self._count,
            sum_s=self._sum_s,
            max_s=self._max_s,
            p50_s=self._quantile_s(0.5),
            p90_s=self._quantile_s(0.9),
            p99_s=self._quantile_s(0.99),
            buckets=filled,
        )


def _bound_s(index: int) -> float:
    return math.inf if index == _NUM_BUCKETS - 1 else _FIRST_S * 2.0 ** (index / _PER_OCTAVE)


class Counts:
    """The counters of `PoolStatistics`, while they run."""

    def __init__(self) -> None:
        self.acquired = 0
        self.warm_hits = 0
        self.built = 0
        self.recycled = 0
        self.unclean = 0
        self.died = 0
        self.shrunk = 0
        self.build_failures = 0
        self.timeouts = 0
        self.refused = 0
        self.cancelled = 0
        self.failed = 0
        self.waits = Histogram()

    def numbers(self) -> dict[str, int]:
        """By name, as `PoolStatistics` takes them."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}
