"""The v2 leaves of one sandbox: one per running command, so that a command can be killed as a whole.

Invariant: a leaf is used by one command at a time; one that background children occupy is not used again before they
are gone.
"""

from __future__ import annotations

import errno
import os
from collections import deque

from sandbox.cgroup import files

_LOOKS_PER_TAKE = 4
"""More than the one that a command adds at most: leaves stay in proportion to those that are occupied in truth."""


class Leaves:
    """Free list of leaf directories below one v2 directory; `reuse=False` makes a new one every time."""

    def __init__(self, parent: str, *, reuse: bool) -> None:
        self._parent = parent
        self._reuse = reuse
        self._made = 0
        self._free: list[str] = []
        self._occupied: deque[str] = deque()
        self._lent: set[str] = set()  # to commands that have not given theirs back

    def first(self) -> str:
        """The path of the leaf that is made with the set (by the jail's first process)."""
        self._made = 1
        leaf = f"{self._parent}/c0"
        self._free = [leaf]
        return leaf

    def take(self) -> str:
        """A leaf without processes; makes one where none is free."""
        if not self._free:
            self._look(_LOOKS_PER_TAKE)
        if self._free:
            leaf = self._free.pop()
        else:
            leaf = f"{self._parent}/c{self._made}"
            self._made += 1
            os.mkdir(leaf)
        self._lent.add(leaf)
        return leaf

    def give_back(self, leaf: str) -> None:
        """Makes the leaf free again, or sets it aside while something lives in it."""
        self._lent.discard(leaf)
        self._occupied.appendleft(leaf)
        self._look(1)

    def _retire(self, leaf: str) -> None:
        """An empty leaf becomes free; where each command gets a fresh one, it is removed."""
        if self._reuse:
            self._free.append(leaf)
            return
        try:
            os.rmdir(leaf)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            self._occupied.append(leaf)  # the kernel is not done with the dead; it goes later, or with the sandbox

    def idle(self) -> bool:
        """No background process is left in any leaf; leaves that have emptied are retired."""
        self._look(len(self._occupied))
        return not self._occupied

    def _look(self, most: int) -> None:
        """Retires those of the longest unseen that have emptied. One that cannot be read stays where it is."""
        for _ in range(min(most, len(self._occupied))):
            occupied = files.populated(self._occupied[0])
            leaf = self._occupied.popleft()
            if occupied:
                self._occupied.append(leaf)
            else:
                self._retire(leaf)

    def all_free(self) -> None:
        """Said after the sandbox's end, when every leaf is empty; also those of commands that ended with it."""
        waiting, self._occupied = [*self._occupied, *self._lent], deque()
        self._lent.clear()
        for leaf in waiting:
            self._retire(leaf)
