"""Frames of encoded values over a non-blocking Unix stream socket, on the event loop.

Owns one end of a socket pair. Invariants: never reads past the frame it was asked for (so the socket can
be handed on between two frames); never holds more than one frame of at most `max_bytes`; a frame
larger than `DECODE_INLINE_BYTES` is decoded in a thread.
"""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Any

import anyio
import anyio.to_thread

from rollout.verify.guest.codec import CodecError, decode, encode

DECODE_INLINE_BYTES = 16 * 1024
_HEADER_BYTES = 4


class ChannelClosed(Exception):
    """The peer closed its end, or died."""


class FrameChannel:
    """The engine's end. Cancelling `send` or `receive` leaves the channel unusable: close it."""

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._max_bytes = max_bytes

    def __enter__(self) -> FrameChannel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sock.close()

    def fileno(self) -> int:
        """The socket's descriptor, to be passed on."""
        return self._sock.fileno()

    async def send(self, *frames: list[Any]) -> None:
        """Sends frames; raises `ChannelClosed` when the peer is gone."""
        payloads = [encode(frame, 1 << 26) for frame in frames]
        data = memoryview(b"".join(len(p).to_bytes(_HEADER_BYTES, "big") + p for p in payloads))
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                await anyio.wait_writable(self._sock)
            except OSError as error:
                raise ChannelClosed(str(error)) from None

    async def receive(self, hashed: bool = True) -> list[Any]:
        """The next frame. Raises `ChannelClosed` at its end and `CodecError` for what is no frame."""
        size = int.from_bytes(await self._read(_HEADER_BYTES), "big")
        if size > self._max_bytes:
            raise CodecError(f"a frame of {size} bytes")
        data = await self._read(size)
        if size > DECODE_INLINE_BYTES:
            frame = await anyio.to_thread.run_sync(decode, data, hashed)
        else:
            frame = decode(data, hashed)
        if not isinstance(frame, list) or not frame or not isinstance(frame[0], str):
            raise CodecError("a frame that is no message")
        return frame

    async def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._sock.recv(size - len(data))
            except BlockingIOError:
                await anyio.wait_readable(self._sock)
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from None
            if not part:
                raise ChannelClosed("closed")
            data += part
        return bytes(data)
