"""A command's streams while it runs: input written bit by bit, output read as it comes.

Owns: the pieces that were read and not yet taken. Invariant: at most one piece of each stream waits here while the
command runs (after its end, what its pipes held), so a consumer that stops taking stops the command's writing.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal

import anyio
import anyio.lowlevel

from sandbox.commands.streams import READ_BYTES, Drain
from sandbox.errors import ConfigError
from sandbox.types import Output

StreamName = Literal["stdout", "stderr"]


class Outlet(AsyncIterator[Output]):
    """The pieces of both streams, for one consumer at a time.

    Args:
        settle: False while the command runs; else gathers its last pieces (or raises its fault) and returns True.
    """

    def __init__(self, settle: Callable[[], Awaitable[bool]]) -> None:
        self._settle = settle
        self._drains: dict[StreamName, Drain] = {}
        self._pieces: deque[Output] = deque()
        self._news = asyncio.Event()
        self._taken = False
        self._finished = False

    def put(self, stream: StreamName, data: bytes) -> None:
        """A piece has come; its drain reads on once it was taken."""
        if not self._finished:
            self._pieces.append(Output(stream, data))
            self.wake()

    def connect(self, stream: StreamName, drain: Drain) -> None:
        """The drain that reads on when its piece was taken."""
        self._drains[stream] = drain

    def wake(self) -> None:
        """Something has happened that the consumer should look at."""
        self._news.set()

    def finish(self) -> None:
        """No more pieces come: the command has ended, and what was in its pipes is here."""
        self._finished = True
        self.wake()

    async def __anext__(self) -> Output:
        if self._taken:
            raise ConfigError("process.output", "a second consumer", "read a command's output in one place at a time")
        self._taken = True
        try:
            while not self._pieces:
                if self._finished:
                    raise StopAsyncIteration
                self._news.clear()
                if not await self._settle():
                    await self._news.wait()
        finally:
            self._taken = False
        piece = self._pieces.popleft()
        if not self._finished:
            self._drains[piece.stream].resume()
        return piece


class StdinPipe:
    """The writing end of a command's stdin.

    Args:
        fd: non-blocking write end; owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._turn = anyio.Lock()
        self._finished = False

    async def write(self, data: bytes) -> bool:
        """Writes all of it, waiting while the pipe is full; False when nobody reads any more."""
        async with self._turn:
            if self._finished:
                raise ConfigError("process.stdin", "closed", "write before close_stdin")
            rest = memoryview(data)
            while rest and self._fd >= 0:
                await anyio.lowlevel.checkpoint()
                try:
                    rest = rest[os.write(self._fd, rest[:READ_BYTES]) :] if self._fd >= 0 else rest
                except BlockingIOError:
                    await self._wait()
                except BrokenPipeError:
                    self.close()
            return not rest

    async def _wait(self) -> None:
        try:
            await anyio.wait_writable(self._fd)
        except anyio.ClosedResourceError:
            return  # closed meanwhile: the loop above sees it

    def finish(self) -> None:
        """Closes it on the caller's behalf: later writes are the caller's mistake."""
        self._finished = True
        self.close()

    def close(self) -> None:
        """Closes it; a waiting `write` returns False. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            anyio.notify_closing(fd)
            os.close(fd)

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [] if self._fd < 0 else [self._fd]


class ReadingEnd:
    """The reading end of a pipe that a transfer comes through.

    Args:
        fd: non-blocking read end; owned from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def read(self) -> bytes:
        """What is there, at most 64 KiB, waiting until there is something; empty at the end."""
        while True:
            try:
                return self.read_now()
            except BlockingIOError:
                await anyio.wait_readable(self._fd)

    def read_now(self) -> bytes:
        """The same; BlockingIOError where there is nothing."""
        return os.read(self._fd, READ_BYTES)

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [] if self._fd < 0 else [self._fd]

    def close(self) -> None:
        """Closes it; who still writes gets EPIPE. Idempotent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
