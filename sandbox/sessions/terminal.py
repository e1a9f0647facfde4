"""A pseudo-terminal of a session, made by the engine.

Owns: both ends, the inner one twice: the shell's, which waits for room, and the engine's, which does not. Invariant:
what the shell's commands can do to it (modes, a stopped output, typed input that nobody read) does not outlast a run;
the engine holds the inner end open as well, so the outer one never sees a hang-up; and what nobody reads between runs
waits in the kernel's bounded buffer.

What is written to a terminal reaches its other end a moment later, so the end of a run's output is found with a fence:
once the run is known to be over, the engine writes a number of its own to the inner end and reads up to it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import termios
from collections.abc import Callable

import anyio

from sandbox.commands.process import DRAIN_S
from sandbox.commands.streams import READ_BYTES, Drain, Feed
from sandbox.errors import SandboxError
from sandbox.sessions.streams import Kept, sealed
from sandbox.sessions.types import Size

_TIOCGPTPEER = 0x5441
_PAUSE_S = 0.0002
_MOST_BYTES = 4 * READ_BYTES
"""Twice what the kernel keeps of a terminal's output, so that nothing of a run is missed."""


class Terminal:
    """Of one session.

    Raises:
        SandboxError: the host gives no terminal, or no descriptors are left.
    """

    def __init__(self, size: Size) -> None:
        self.outer = self.inner = self._own = -1
        try:
            self.outer, self.inner = os.openpty()
            self._own = fcntl.ioctl(self.outer, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self.close()
            raise SandboxError(f"no pseudo-terminal for a session: {error.strerror}") from error
        os.set_blocking(self.outer, False)
        self.resize(size)
        self._modes = termios.tcgetattr(self.inner)

    def resize(self, size: Size) -> None:
        """From now on; the foreground is told by SIGWINCH."""
        termios.tcsetwinsize(self.outer, (size.rows, size.cols))

    def renew(self) -> None:
        """As it was at first; what was typed and not read is gone."""
        termios.tcflow(self._own, termios.TCOON)
        termios.tcsetattr(self._own, termios.TCSANOW, self._modes)
        termios.tcflush(self._own, termios.TCIFLUSH)

    async def read_to_fence(self) -> bytes:
        """What was written to it until now; less where its output stands still, or never ends."""
        fence = f"\0{secrets.randbits(96):029}\0".encode()
        found, unsaid = b"", fence
        with anyio.move_on_after(DRAIN_S):
            while fence not in found and len(found) < _MOST_BYTES:
                unsaid = unsaid[self._say(unsaid) :]
                try:
                    found += os.read(self.outer, READ_BYTES)
                except BlockingIOError:
                    await anyio.sleep(_PAUSE_S)
        return found.partition(fence)[0]

    def _say(self, data: bytes) -> int:
        try:
            return os.write(self._own, data) if data else 0
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Hangs up; idempotent."""
        for fd in self.disown():
            os.close(fd)
        self.outer = self.inner = self._own = -1

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [fd for fd in (self.outer, self.inner, self._own) if fd >= 0]


class TypedStreams:
    """Of a run on a terminal: stdin is typed, and stdout is all that the terminal shows.

    Args:
        script, keep_bytes, flood_bytes, on_flood: as of `Streams`.

    Raises:
        SandboxError: no descriptors are left.
    """

    def __init__(
        self,
        terminal: Terminal,
        script: bytes,
        stdin: bytes,
        keep_bytes: int,
        flood_bytes: int,
        on_flood: Callable[[], None],
    ) -> None:
        self._terminal = terminal
        self._feed: Feed | None = None
        self.theirs: list[int] = []
        """The script, for the holder."""
        terminal.renew()
        try:
            self.theirs.append(sealed(script))
            self._drain = Drain(os.dup(terminal.outer), keep_bytes, flood_bytes, on_flood)
        except OSError as error:
            self.begun()
            raise SandboxError(f"no descriptors for a run: {error.strerror}") from error
        if stdin:
            self.type(stdin)

    def type(self, data: bytes) -> None:
        """Types; what was being typed before is cut off."""
        if self._feed is not None:
            self._feed.stop()
        self._feed = Feed(os.dup(self._terminal.outer), data)

    def begun(self) -> None:
        """The holder has the script: closes it here."""
        while self.theirs:
            os.close(self.theirs.pop())

    async def settle(self) -> None:
        """Takes what was written until now."""
        if self._feed is not None:
            self._feed.stop()
        self._drain.pause()
        self._drain.take(await self._terminal.read_to_fence())

    def result(self) -> tuple[Kept, Kept]:
        """Of stdout and of stderr, which is none."""
        return self._drain.result(), (b"", 0)

    def take_open(self) -> list[int]:
        """Ends reading; nothing is left to others."""
        if self._feed is not None:
            self._feed.stop()
        fd = self._drain.stop()
        if fd is not None:
            os.close(fd)
        return []

    def close(self) -> None:
        """Closes what is this run's; idempotent."""
        self.begun()
        self.take_open()

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        feed = [] if self._feed is None else self._feed.disown()
        return [*self.theirs, *self._drain.disown(), *feed]
