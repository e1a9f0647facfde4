"""Cgroup sets that wait for their next sandbox, by limits.

Owns: which sets exist and which are free. Invariant: a set is free only after its sandbox's end, and at most
`MAX_FREE` are; decisions are synchronous, and the caller lets the warden carry them out.
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
        self._num_free = 0
        self._next_index = 0

    def take(self, limits: Limits) -> CgroupSet:
        """A set for these limits; a new one where none is free."""
        free = self._free.get(limits)
        if free:
            self._num_free -= 1
            return free.pop()
        self._next_index += 1
        return self._backend.new_set(self._next_index - 1, limits)

    def make_room(self, limits: Limits) -> tuple[str, ...]:
        """Called before `put`: directories to remove because a set for other limits gives way, if the pool is full."""
        if self._num_free < self._max_free:
            return ()
        for key, free in self._free.items():
            if key != limits and free:
                self._num_free -= 1
                return free.pop(0).remove_paths()
        return ()

    def has_room(self) -> bool:
        """May another set be put back?"""
        return self._num_free < self._max_free

    def put(self, limits: Limits, cgroups: CgroupSet) -> None:
        """Gives back a set whose sandbox has ended."""
        self._free.setdefault(limits, []).append(cgroups)
        self._num_free += 1
