"""Cgroup sets that wait for their next sandbox, by limits.

Owns: which sets exist and which are free. Invariant: a set is free only after its sandbox's end, and at most
`MAX_FREE` are free or have a place promised; decisions are synchronous, and the caller lets the warden carry them out.
"""

from __future__ import annotations

from sandbox.cgroup.types import Backend, CgroupSet
from sandbox.types import Limits

MAX_FREE = 512
"""Making and removing a set costs more than keeping it, and a removed one lingers in the kernel as well."""


class SetPool:
    """Free sets of one backend; the one used last is taken first."""

    def __init__(self, backend: Backend, max_free: int = MAX_FREE) -> None:
        self._backend = backend
        self._max_free = max_free
        self._free: dict[Limits, list[CgroupSet]] = {}
        self._num_taken = 0  # places of free sets, and those promised
        self._next_index = 0

    def take(self, limits: Limits) -> CgroupSet:
        """A set for these limits; a new one where none is free."""
        if limits in self._free:
            return self._remove(limits, -1)
        self._next_index += 1
        return self._backend.new_set(self._next_index - 1, limits)

    def _remove(self, limits: Limits, index: int) -> CgroupSet:
        free = self._free[limits]
        self._num_taken -= 1
        cgroups = free.pop(index)
        if not free:
            del self._free[limits]
        return cgroups

    def promise(self, limits: Limits) -> tuple[str, ...] | None:
        """A place for a set whose sandbox is ending; `put` or `forgo` must follow.

        Returns the directories to remove, because a set for other limits gives way in a full pool; None where there is
        no place.
        """
        gone: tuple[str, ...] = ()
        if self._num_taken >= self._max_free:
            other = next((key for key in self._free if key != limits), None)
            if other is None:
                return None
            gone = self._remove(other, 0).remove_paths()
        self._num_taken += 1
        return gone

    def put(self, limits: Limits, cgroups: CgroupSet) -> None:
        """Gives back, to its promised place, a set whose sandbox has ended."""
        self._free.setdefault(limits, []).append(cgroups)

    def forgo(self) -> None:
        """The promised place is not needed: the set cannot be used again."""
        self._num_taken -= 1
