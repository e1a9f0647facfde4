"""A non-blocking SEQPACKET socket that carries frames, on the running event loop.

Owns: the socket and its registration with the loop. Invariant: frames leave in the order of `send`; received
descriptors are either handed to `on_frame` or closed; after the end (`on_end`, called once) nothing is delivered.
"""

from __future__ import annotations

import array
import asyncio
import errno
import os
import socket
from collections.abc import Callable, Sequence

import anyio

from sandbox.errors import ProtocolError, SandboxDiedError, SandboxError
from sandbox.exhaustion import fault
from sandbox.protocol.wire import Frame, decode

_RECEIVE_BYTES = 16 * 1024
_FRAMES_PER_TURN = 32
_MAX_FDS = 8
_POST_TIMEOUT_S = 10.0
_POST_PAUSE_S = 0.05
_ENDED = "its process ended"
_OURS = (errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS, errno.EMSGSIZE, errno.EBADF)


def _always() -> bool:
    return True


class FrameLink:
    """One end of a frame socket.

    Args:
        end: the connected socket; owned from now on.
        on_frame: takes a frame and its descriptors (which it then owns; none where `frame.lost`); must not block.
        on_end: told why, when the peer is gone or has broken the format.
    """

    def __init__(
        self, end: socket.socket, on_frame: Callable[[Frame, list[int]], None], on_end: Callable[[str], None]
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._on_frame = on_frame
        self._on_end = on_end
        self._turn = anyio.Lock()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(end.fileno(), self._readable)
        self._late: set[asyncio.Future[None]] = set()
        self.open = True

    def send_nowait(self, frame: bytes, fds: Sequence[int] = (), wanted: Callable[[], bool] = _always) -> bool:
        """Sends at once, or returns False where the socket is full or others wait.

        Args:
            wanted: asked just before; a frame that is not wanted any more is not sent.

        Raises:
            SandboxDiedError: the peer is gone, or the frame not wanted.
        """
        self._require(wanted)
        if self._turn.locked():
            return False
        return self._try_send(frame, fds)

    def _require(self, wanted: Callable[[], bool]) -> None:
        if not self.open or not wanted():
            raise SandboxDiedError("the peer of this socket has ended")

    def _try_send(self, frame: bytes, fds: Sequence[int]) -> bool:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([frame], rights)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _OURS:
                raise fault("a frame could not be sent", error.errno) from error
            raise SandboxDiedError(f"the peer of this socket has ended ({error.strerror})") from None
        return True

    async def send(self, frame: bytes, fds: Sequence[int] = (), wanted: Callable[[], bool] = _always) -> None:
        """Sends in turn. Cancelled, the frame was not sent.

        Args:
            wanted: asked just before; a frame that is not wanted any more is not sent.

        Raises:
            SandboxDiedError: the peer is gone, or the frame not wanted.
            SandboxError: the kernel refuses (memory, too many descriptors in flight).
        """
        if self.send_nowait(frame, fds, wanted):
            return
        async with self._turn:
            while True:
                self._require(wanted)
                if self._try_send(frame, fds):
                    return
                try:
                    await anyio.wait_writable(self._socket)
                except anyio.ClosedResourceError:
                    raise SandboxDiedError("the socket was closed") from None

    def post(self, frame: bytes, wanted: Callable[[], bool] = _always) -> None:
        """Sends a frame that nobody waits for: at once, or as soon as the socket and the kernel have room.

        A frame that cannot be sent in `_POST_TIMEOUT_S` ends the link (`on_end` is told): it may be an order to kill.
        """
        try:
            if self.send_nowait(frame, (), wanted):
                return
        except SandboxDiedError:
            return  # its end is reported by `on_end`
        except SandboxError:
            pass  # short of memory: the task tries again
        task = asyncio.ensure_future(self._send_late(frame, wanted))
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _send_late(self, frame: bytes, wanted: Callable[[], bool]) -> None:
        """Ends with the socket at the latest."""
        why = "its socket stays full"
        with anyio.move_on_after(_POST_TIMEOUT_S):
            while True:
                try:
                    return await self.send(frame, (), wanted)
                except SandboxDiedError:
                    return None
                except SandboxError as error:
                    why = str(error)
                await anyio.sleep(_POST_PAUSE_S)
        self._end(why)
        return None

    def _readable(self) -> None:
        for _ in range(_FRAMES_PER_TURN):
            if not self.open:
                return
            try:
                data, control, flags, _ = self._socket.recvmsg(
                    _RECEIVE_BYTES, socket.CMSG_SPACE(_MAX_FDS * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError as error:
                reset = error.errno == errno.ECONNRESET  # it had not read all that it was sent
                self._end(_ENDED if reset else error.strerror or "socket error")
                return
            fds = _take_fds(control)
            if not data and not fds:
                self._end(_ENDED)
                return
            try:
                lost = bool(flags & socket.MSG_CTRUNC) and len(fds) < _MAX_FDS  # no free number: not the peer's fault
                if flags & socket.MSG_TRUNC or (flags & socket.MSG_CTRUNC and not lost):
                    raise ProtocolError("a frame longer than any answer")
                frame = decode(data)._replace(lost=lost)
            except ProtocolError as error:
                for fd in fds:
                    os.close(fd)
                self._end(str(error))
                return
            if frame.lost:
                while fds:
                    os.close(fds.pop())
            self._on_frame(frame, fds)

    def _end(self, why: str) -> None:
        if self.open:
            self.close()
            self._on_end(why)

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        if not self.open:
            return []
        self.open = False
        return [self._socket.fileno()]

    def close(self) -> None:
        """Closes the socket, which ends the peer; idempotent, `on_end` is not called."""
        if self.open:
            self.open = False
            self._loop.remove_reader(self._socket.fileno())
            anyio.notify_closing(self._socket)
            self._socket.close()


def _take_fds(control: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
