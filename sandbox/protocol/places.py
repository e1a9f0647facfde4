"""How many requests of one kind run in a sandbox at once: as many as its agent has room for, and the others wait.

Owns: who has a place, and the leaf control groups that come with them. Invariant: a place is free again when the agent
has said that its holder is over (or was never asked for it), so that its table is never full by what is asked; who
waits is served in the order of coming.
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from sandbox.cgroup import files
from sandbox.cgroup.types import CgroupSet
from sandbox.errors import SandboxDiedError, SandboxError

MAX_COMMANDS = 256
MAX_HELPERS = 64
"""Together well below what an agent has room for (MAX_COMMANDS of agent.c): keepers of background processes stay."""


class Places:
    """The places of one sandbox for one kind of request, known by the requests' numbers."""

    def __init__(self, cgroups: CgroupSet, num_places: int) -> None:
        self._cgroups = cgroups
        self._free = anyio.Semaphore(num_places, fast_acquire=True)
        self._held: set[int] = set()
        self._set_aside: dict[int, str] = {}  # leaves of those that left before the agent said that they are over
        self._why_closed: str | None = None

    async def take(self, ident: int) -> str | None:
        """A place and its leaf (None without cgroups), as soon as there is one. Cancelled, nothing was taken.

        Raises:
            SandboxDiedError: the sandbox has ended, maybe while this waited.
            SandboxError: no leaf can be made now (no descriptors).
        """
        await self._free.acquire()
        if self._why_closed is not None:
            self._free.release()  # wakes the next one
            raise SandboxDiedError(self._why_closed)
        self._held.add(ident)
        try:
            with files.vanishing():
                return self._cgroups.take_leaf()
        except SandboxError:
            self.over(ident)
            raise

    def over(self, ident: int) -> None:
        """The agent has said that the holder is over, or was never asked: its place is free. Others are ignored."""
        if ident in self._held:
            self._held.remove(ident)
            self._free.release()
        leaf = self._set_aside.pop(ident, None)
        if leaf is not None:
            with suppress(SandboxError), files.vanishing():
                self._cgroups.kill_leaf(leaf)
            self.give_back(leaf)

    def give_back(self, leaf: str | None) -> None:
        """The leaf is for others now (or later, once it is empty); one that cannot be read stays set aside."""
        if leaf is not None and self._why_closed is None:
            with suppress(SandboxError), files.vanishing():
                self._cgroups.return_leaf(leaf)

    def set_aside(self, ident: int, leaf: str | None) -> None:
        """The holder left unreported: the agent may not even have begun it, and it will join this leaf then."""
        if leaf is not None:
            self._set_aside[ident] = leaf

    def close(self, why: str) -> None:
        """The sandbox has ended: who waits gets `SandboxDiedError`. Idempotent."""
        if self._why_closed is None:
            self._why_closed = why
            held, self._held = self._held, set()
            for _ in held:
                self._free.release()

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        self._why_closed = "the sandbox is the parent process's"
        return []
