"""One lease's way to the agent of its jail, whose socket outlives the lease.

Owns: nothing. Invariant: after `end` nothing of this lease is sent, not even what waited for room, and nothing is
delivered to it: a request must not reach the jail's next tenant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sandbox.protocol.link import FrameLink
from sandbox.protocol.wire import Frame


class Line:
    """Made with a lease.

    Args:
        link: the jail's socket.
        on_frame: takes a frame and its descriptors (which it then owns).
        on_end: told why, when the agent is gone or has broken the format.
    """

    def __init__(
        self, link: FrameLink, on_frame: Callable[[Frame, list[int]], None], on_end: Callable[[str], None]
    ) -> None:
        self._link = link
        self._ended = False
        self.on_frame = on_frame
        self.on_end = on_end

    @property
    def open(self) -> bool:
        """May anything be sent?"""
        return not self._ended and self._link.open

    async def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """As `FrameLink.send`; SandboxDiedError also after the lease's end."""
        await self._link.send(frame, fds, self._goes_on)

    def post(self, frame: bytes) -> None:
        """As `FrameLink.post`; nothing after the lease's end."""
        self._link.post(frame, self._goes_on)

    def _goes_on(self) -> bool:
        return not self._ended

    def end(self) -> None:
        """Ends it; idempotent."""
        self._ended = True
