"""Turns for what should not be done too often at once.

Owns: who has a turn. Invariant: at most `count` have one; who keeps it for longer than `slow_s` gives it up while going
on, as long as not more than `count` do, so that what is slow or stuck holds up nobody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

SLOW_S = 2.0


class Turns:
    """A semaphore that the slow do not keep."""

    def __init__(self, count: int, slow_s: float = SLOW_S) -> None:
        self._free = anyio.Semaphore(count)
        self._count = count
        self._slow_s = slow_s
        self.num_slow = 0
        """Those that go on without a turn."""

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn and has it until the context is left, or `slow_s` are over."""
        await self._free.acquire()
        slow = False

        def relieve() -> None:
            nonlocal slow
            if self.num_slow < self._count:
                slow = True
                self.num_slow += 1
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._slow_s, relieve)
        try:
            yield
        finally:
            timer.cancel()
            if slow:
                self.num_slow -= 1
            else:
                self._free.release()
