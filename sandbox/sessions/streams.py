"""The script and the streams of one run.

Owns: the engine's ends of the run's pipes, and until the run begins the other ends and the script. Invariant: what is
kept is bounded as a command's; the script cannot be changed once the shell may see it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

import anyio

from sandbox.commands.process import DRAIN_S
from sandbox.commands.streams import Drain, Feed
from sandbox.errors import SandboxError
from sandbox.protocol.forks import Owner

_FOR_ALL = 0o666
"""Of a pipe: the shell opens it by name, with a user of its own."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
Kept = tuple[bytes, int]
"""What was kept of a stream, and how many bytes are missing between head and tail."""


def sealed(script: bytes) -> int:
    """A descriptor of a file in memory that nobody can change any more."""
    fd = os.memfd_create("script", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(script)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


class Streams:
    """Of a run without a terminal.

    Args:
        script: what the shell is to source.
        stdin: empty for /dev/null.
        keep_bytes: of each of stdout and stderr.
        flood_bytes: calls `on_flood` once when one of them has produced that much.

    Raises:
        SandboxError: no descriptors are left.
    """

    def __init__(
        self, script: bytes, stdin: bytes, keep_bytes: int, flood_bytes: int, on_flood: Callable[[], None]
    ) -> None:
        self._feed: Feed | None = None
        self._drains: list[Drain] = []
        self.theirs: list[int] = []
        """Script, stdin, stdout and stderr, for the holder."""
        try:
            self.theirs.append(sealed(script))
            if stdin:
                theirs, ours = os.pipe2(os.O_CLOEXEC)
                self.theirs.append(theirs)
                os.fchmod(theirs, _FOR_ALL)
                os.set_blocking(ours, False)
                self._feed = Feed(ours, stdin)
            else:
                self.theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
            for _ in range(2):
                ours, theirs = os.pipe2(os.O_CLOEXEC)
                self.theirs.append(theirs)
                os.fchmod(theirs, _FOR_ALL)
                os.set_blocking(ours, False)
                self._drains.append(Drain(ours, keep_bytes, flood_bytes, on_flood))
        except OSError as error:
            self.close()
            raise SandboxError(f"no descriptors for a run: {error.strerror}") from error

    def begun(self) -> None:
        """The holder has them: closes the other ends here."""
        while self.theirs:
            os.close(self.theirs.pop())

    async def settle(self) -> None:
        """Takes what is in the pipes, then waits briefly for their end."""
        if self._feed is not None:
            self._feed.stop()
        for drain in self._drains:
            drain.read_available()
        if not all(drain.ended.is_set() for drain in self._drains):
            with anyio.move_on_after(DRAIN_S):
                for drain in self._drains:
                    await drain.ended.wait()

    def result(self) -> tuple[Kept, Kept]:
        """Of stdout and of stderr."""
        return self._drains[0].result(), self._drains[1].result()

    def take_open(self) -> list[int]:
        """Ends reading; descriptors of streams that background processes still hold."""
        if self._feed is not None:
            self._feed.stop()
        return [fd for drain in self._drains if (fd := drain.stop()) is not None]

    def close(self) -> None:
        """Closes everything; idempotent."""
        self.begun()
        for fd in self.take_open():
            os.close(fd)

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        ends: list[Owner] = [*self._drains, *([] if self._feed is None else [self._feed])]
        return [*self.theirs, *(fd for end in ends for fd in end.disown())]
