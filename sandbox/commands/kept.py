"""Output streams that background children of finished commands still hold.

Owns: the engine's ends of those pipes. Invariant: what comes is read and thrown away, more and more seldom while there
is always as much as a read takes: hundreds of children that only write (64 KiB every second each) cost the loop next to
nothing, one that rests now and then gets 1.3 MB/s, a silent stream costs nothing at all, and all streams of an engine
together are read `READS_PER_S` times a second at most. At most `MAX_KEPT` are
open, and the oldest is closed when one more comes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from sandbox.commands.streams import READ_BYTES

MAX_KEPT = 32
READS_PER_S = 500
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Pace:
    """How often the kept streams of all sandboxes of one engine are read together: `READS_PER_S` at most.

    However many there are, what background processes write takes a fixed part of the loop.
    """

    def __init__(self) -> None:
        self._next_s = 0.0

    def pause_s(self, now_s: float, least_s: float) -> float:
        """How long the stream that was read now is to wait; the turn is then its own."""
        at_s = max(now_s + least_s, self._next_s)
        self._next_s = max(self._next_s, now_s) + 1 / READS_PER_S
        return at_s - now_s


class KeptStreams:
    """Reads and discards, so that a server in the background never waits for room in its log's pipe."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._pauses: dict[int, asyncio.TimerHandle | None] = {}  # in the order of coming; None: waits for data
        self._pause_s: dict[int, float] = {}  # after the next read

    def add(self, fds: Iterable[int]) -> None:
        """Takes non-blocking reading ends, and closes the oldest ones over the limit."""
        for fd in fds:
            self._pause_s[fd] = _FIRST_PAUSE_S
            self._go_on(fd)
        while len(self._pauses) > MAX_KEPT:
            self._close(next(iter(self._pauses)))

    def _discard(self, fd: int) -> None:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._close(fd)
            return
        self._loop.remove_reader(fd)
        pause_s = self._pause_s[fd]
        self._pauses[fd] = self._loop.call_later(self._pace.pause_s(self._loop.time(), pause_s), self._go_on, fd)
        full = len(data) == READ_BYTES
        self._pause_s[fd] = min(pause_s * 2, _LONGEST_PAUSE_S) if full else _FIRST_PAUSE_S

    def _go_on(self, fd: int) -> None:
        self._pauses[fd] = None
        self._loop.add_reader(fd, self._discard, fd)

    def _close(self, fd: int) -> None:
        pause = self._pauses.pop(fd)
        del self._pause_s[fd]
        if pause is not None:
            pause.cancel()
        else:
            self._loop.remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        """Closes all of them; who still writes gets EPIPE. Idempotent."""
        for fd in list(self._pauses):
            self._close(fd)

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return list(self._pauses)
