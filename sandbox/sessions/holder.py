"""The process inside that holds a run's descriptors for the shell to open, and signals what the run has started.

Owns: the socket to it. Invariant: it is in the hands of the sandboxed code, so an answer is believed about that code's
own session only, a wrong or unasked one ends the conversation, and none is waited for longer than `_ANSWER_S`
while the sandbox is not frozen.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence

import anyio

from sandbox.errors import ProtocolError, SandboxDiedError, SandboxError
from sandbox.protocol.link import FrameLink
from sandbox.protocol.wire import Frame, Held, Kind, Tag, encode

_ANSWER_S = 5.0
_MOST_WAITS = 12


class HolderGoneError(SandboxError):
    """The holder has ended, says nonsense, or does not answer."""


class Holder:
    """The engine's end. One question at a time.

    Args:
        end: owned from now on.
        frozen: does everything inside stand still?
    """

    def __init__(self, end: socket.socket, frozen: Callable[[], bool] = lambda: False) -> None:
        self._frozen = frozen
        self._link = FrameLink(end, self._on_frame, self._on_end)
        self._number = 0
        self._answer: asyncio.Future[Frame] | None = None

    def _on_frame(self, frame: Frame, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if self._answer is None or self._answer.done() or fds or (frame.kind, frame.ident) != (Kind.HELD, self._number):
            self.close()
        else:
            self._answer.set_result(frame)

    def _on_end(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(HolderGoneError(f"a session's holder has ended ({why})"))

    async def ask(self, kind: Kind, fds: Sequence[int] = ()) -> tuple[Held, str | None]:
        """Its answer, and the shell's directory where it was asked to `LOOK` (None where that has no name).

        Raises:
            HolderGoneError: there is none that makes sense; there will be none later either.
        """
        self._number += 1
        answer = self._answer = asyncio.get_running_loop().create_future()
        try:
            with anyio.fail_after(_ANSWER_S, shield=True):
                await self._link.send(encode(kind, self._number), fds)
            with anyio.CancelScope(shield=True):
                await self._wait_for(answer)
            frame = answer.result()
            return frame.held(), _directory(frame)
        except (SandboxDiedError, ProtocolError, TimeoutError) as error:
            self._answer = None
            self.close()
            raise HolderGoneError("a session's holder does not answer") from error
        except asyncio.CancelledError:
            self._answer = None
            self.close()  # a late answer would be taken for that of the next question
            raise
        finally:
            self._answer = None

    async def _wait_for(self, answer: asyncio.Future[Frame]) -> None:
        """As long as it takes while all stand still, up to a minute; else TimeoutError after `_ANSWER_S`."""
        for _ in range(_MOST_WAITS):
            done, _ = await asyncio.wait([answer], timeout=_ANSWER_S)
            if done:
                return
            if not self._frozen():
                break
        raise TimeoutError

    def drop(self) -> None:
        """The run is over: its descriptors are closed there."""
        self._link.post(encode(Kind.DROP, 0))

    def close(self) -> None:
        """Ends it; idempotent."""
        self._link.close()
        self._on_end("closed")

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return self._link.disown()


def _directory(frame: Frame) -> str | None:
    value = frame.value(Tag.CWD)
    if value is None:
        return None
    path = value.rstrip(b"\0").decode("utf-8", "surrogateescape")
    return path if path.startswith("/") and "\0" not in path else None
