"""Admission of groups: how many may be on their way at once.

Owns the count of groups that were admitted and not yet released. Synchronous and without I/O:
callers ask, then act. Invariant: the count never exceeds the capacity, and with release after
the consuming step no group is consumed more than `max_staleness` versions after its admission
(the capacity formula of AReaL and torchtitan, for groups consumed in whole batches).
"""

from __future__ import annotations


class Window:
    """A counter of slots.

    Args:
        capacity: groups admitted and not yet released, at most.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1, capacity
        self.capacity = capacity
        self.num_admitted = 0
        self.num_released = 0

    @property
    def num_outstanding(self) -> int:
        """Groups that hold a slot."""
        return self.num_admitted - self.num_released

    def admit(self) -> bool:
        """Takes a slot; False when none is free."""
        if self.num_outstanding >= self.capacity:
            return False
        self.num_admitted += 1
        return True

    def release(self, num_groups: int) -> None:
        """Frees slots of groups that were consumed or dropped."""
        assert 0 <= num_groups <= self.num_outstanding, (num_groups, self.num_outstanding)
        self.num_released += num_groups
