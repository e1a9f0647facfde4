"""Output collected and input fed without ever blocking the loop.

Owns: the engine's end of one pipe each. Invariant: a drain holds what it keeps and one read, whatever the other side
writes, and `result` one copy more; a feed holds nothing but the caller's bytes.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import termios
from collections.abc import Callable

import anyio

READ_BYTES = 64 * 1024


class Drain:
    """Reads one stream to its end; keeps head and tail, counts the rest.

    Args:
        fd: non-blocking read end; owned from now on.
        keep_bytes: how much is kept, half of it from the start and half from the end.
        flood_bytes: calls `on_flood` once when that much has come.
        on_piece: is given every piece as it comes, and reading then pauses until `resume`; None to read on.
    """

    def __init__(
        self,
        fd: int,
        keep_bytes: int,
        flood_bytes: int,
        on_flood: Callable[[], None],
        on_piece: Callable[[bytes], None] | None = None,
    ) -> None:
        self._fd = fd
        self._head_room = keep_bytes - keep_bytes // 2
        self._tail_room = keep_bytes // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._oldest = 0  # where the tail starts once it is full: it is overwritten in a circle
        self._flood_bytes = flood_bytes
        self._on_flood = on_flood
        self._on_piece = on_piece
        self._flooded = False
        self._loop = asyncio.get_running_loop()
        self.total_bytes = 0
        self.ended = anyio.Event()
        self._loop.add_reader(fd, self.read_some)

    def read_some(self) -> bool:
        """Takes one piece; False when there is none now (or ever)."""
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(self._let_go())
            return False
        self.take(data)
        if self._on_piece is not None:
            self._loop.remove_reader(self._fd)
            self._on_piece(data)
        return True

    def read_available(self) -> None:
        """Takes what is in the pipe now (what a pipe holds and one piece, at most); sees its end if that is there."""
        if self._fd < 0:
            return
        there = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, there)
        until_bytes = self.total_bytes + there[0]
        while self.total_bytes <= until_bytes and self.read_some():
            continue

    def resume(self) -> None:
        """Reads on after a piece; nothing to do once the stream has ended."""
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self.read_some)

    def pause(self) -> None:
        """Reads nothing more by itself."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)

    def take(self, data: bytes) -> None:
        """Counts and keeps a piece (that was read elsewhere)."""
        self.total_bytes += len(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._keep_tail(memoryview(data))
        if self.total_bytes >= self._flood_bytes and not self._flooded:
            self._flooded = True
            self._on_flood()

    def _keep_tail(self, data: memoryview) -> None:
        data = data[max(0, len(data) - self._tail_room) :]
        room = self._tail_room - len(self._tail)
        self._tail += data[:room]
        data = data[room:]
        while data:
            piece = data[: self._tail_room - self._oldest]
            self._tail[self._oldest : self._oldest + len(piece)] = piece
            self._oldest = (self._oldest + len(piece)) % self._tail_room
            data = data[len(piece) :]

    def _let_go(self) -> int:
        fd, self._fd = self._fd, -1
        self._loop.remove_reader(fd)
        self.ended.set()
        return fd

    def stop(self) -> int | None:
        """Stops reading; returns the descriptor while the other side still holds the stream."""
        return None if self._fd < 0 else self._let_go()

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [] if self._fd < 0 else [self._fd]

    def result(self) -> tuple[bytes, int]:
        """What was kept, and how many bytes are missing between head and tail."""
        tail = memoryview(self._tail)
        kept = b"".join((self._head, tail[self._oldest :], tail[: self._oldest]))
        return kept, self.total_bytes - len(kept)


class Feed:
    """Writes bytes to a pipe and closes it; a reader that goes away ends it silently.

    Args:
        fd: non-blocking write end; owned from now on.
    """

    def __init__(self, fd: int, data: bytes) -> None:
        self._fd = fd
        self._rest = memoryview(data)
        self._waiting = False
        self._loop = asyncio.get_running_loop()
        self._write()

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._fd, self._rest[:READ_BYTES]) :]
        except BlockingIOError:
            if not self._waiting:
                self._waiting = True
                self._loop.add_writer(self._fd, self._write)
            return
        except BrokenPipeError:
            pass
        self.stop()

    def stop(self) -> None:
        """Closes the pipe, whatever is left; idempotent."""
        if self._fd >= 0:
            if self._waiting:
                self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._rest = memoryview(b"")

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [] if self._fd < 0 else [self._fd]
