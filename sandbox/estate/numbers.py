"""The numbers of an engine's jails, and the uids that go with them.

Owns: which numbers are free. Invariant: a number is given out again only after it was put back; where jails run under
uids of their own, equal numbers mean equal uids.
"""

from __future__ import annotations

import heapq
import os

from sandbox.errors import StartError


class Numbers:
    """Gives out the smallest free number."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0
        self._inner: range | None = None
        self._host: range | None = None

    def map(self, inner: range, host: range) -> None:
        """From now on jails have uids of their own.

        Args:
            inner: as the warden sees them.
            host: as the host sees them.
        """
        self._inner, self._host = inner, host

    def take(self) -> int:
        """A number that nobody has."""
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def put(self, number: int) -> None:
        """Nothing is left of what had it."""
        heapq.heappush(self._free, number)

    def uids(self, number: int) -> tuple[int, int]:
        """The uid as the warden sees it (0 where it changes to none), and as the host does.

        Raises:
            StartError: there are no more.
        """
        if self._inner is None or self._host is None:
            return 0, os.geteuid()
        if number >= len(self._inner):
            raise StartError(f"all {len(self._inner)} host uids of this engine are in use, or were not given back")
        return self._inner[number], self._host[number]
