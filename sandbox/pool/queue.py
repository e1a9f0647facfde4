"""Who is served next.

Owns: the order of those that wait. Invariant: at most `max_length` wait; the order between two of them never changes:
a level of priority is worth `aging_s` seconds of waiting, so that within a priority the first to come is the first to
be served, and nobody waits behind later ones for ever.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A bounded queue with priorities that age."""

    def __init__(self, max_length: int, aging_s: float) -> None:
        self._max_length = max_length
        self._aging_s = aging_s
        self._heap: list[tuple[float, int, T]] = []
        self._numbers: dict[T, int] = {}  # of those that still wait; the heap also holds some that left
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, item: T, priority: int, now_s: float) -> bool:
        """Lets an item wait; False, and nothing changed, where the queue is full.

        Args:
            priority: higher is served earlier.
        """
        if len(self._numbers) >= self._max_length:
            return False
        number = self._numbers[item] = self._next_number
        self._next_number += 1
        heapq.heappush(self._heap, (now_s - priority * self._aging_s, number, item))
        return True

    def first(self) -> T | None:
        """The next to be served, left in its place; None where nobody waits."""
        while self._heap:
            _, number, item = self._heap[0]
            if self._numbers.get(item) == number:
                return item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T:
        """Takes the first out; there must be one."""
        item = self.first()
        assert item is not None
        heapq.heappop(self._heap)
        del self._numbers[item]
        return item

    def discard(self, item: T) -> bool:
        """Takes an item out wherever it stands; False where it does not wait."""
        if self._numbers.pop(item, None) is None:
            return False
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._numbers):  # most of it has left
            self._heap = [entry for entry in self._heap if self._numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        return True
