"""One end of a SEQPACKET socket that carries typed messages and, with some of them, descriptors.

Owns the packet rules. Invariant: one message is one packet of at most `MAX_PACKET_BYTES`; descriptors
are accepted only with a message whose type announces them, and every other one is closed at once.
The socket is non-blocking; waiting is the caller's.
"""

from __future__ import annotations

import array
import os
import select
import socket
import time
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from rollout.lane.errors import LaneFault, PeerGone

MAX_PACKET_BYTES = 32 * 1024
MAX_FDS = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages; the class name is the tag on the wire."""

    num_fds: ClassVar[int] = 0
    """Descriptors that travel with a message of this type."""


Incoming = TypeVar("Incoming", bound=Message)


class Channel(Generic[Incoming]):
    """Sends any message and receives those of one union.

    Args:
        sock: a connected AF_UNIX SEQPACKET socket; the channel owns it from here on.
        incoming: the union of message types that may arrive.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            raise LaneFault(f"the lane needs an AF_UNIX SEQPACKET socket, not {sock.family!r} {sock.type!r}")
        sock.setblocking(False)
        self._sock = sock
        self._decoder: msgspec.json.Decoder[Incoming] = msgspec.json.Decoder(incoming)
        self._hangup = select.poll()
        self._hangup.register(sock, select.POLLRDHUP)

    def fileno(self) -> int:
        """The socket's descriptor, for polling."""
        return self._sock.fileno()

    def try_send(self, message: Message, fds: tuple[int, ...] = ()) -> bool:
        """Sends one message, or returns False where the socket's buffer is full.

        Raises:
            PeerGone: nobody holds the other end.
        """
        packet = msgspec.json.encode(message)
        if len(packet) > MAX_PACKET_BYTES or len(fds) != message.num_fds:
            raise LaneFault(f"{type(message).__name__}: {len(packet)} bytes and {len(fds)} descriptors do not fit")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._sock.sendmsg([packet], ancillary, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except (BrokenPipeError, ConnectionResetError, ConnectionRefusedError) as error:
            raise PeerGone(f"sending {type(message).__name__}: the other process is gone") from error
        return True

    def send(self, message: Message, fds: tuple[int, ...] = (), *, timeout_s: float = 10.0) -> None:
        """Blocking send; for threads that run no event loop.

        Raises:
            PeerGone: nobody holds the other end.
            LaneFault: the other process read nothing for `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        while not self.try_send(message, fds):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise LaneFault(f"sending {type(message).__name__}: nothing was read for {timeout_s} s")
            writable.poll(remaining_s * 1000)

    def receive(self) -> tuple[Incoming, tuple[int, ...]] | None:
        """Next message with its descriptors, which the caller then owns; None where nothing waits.

        Raises:
            PeerGone: the other process is gone and everything it sent has been read.
            LaneFault: the packet is not a message of this channel.
        """
        try:
            packet, ancillary, flags, _ = self._sock.recvmsg(
                MAX_PACKET_BYTES, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise PeerGone("the other process is gone") from error
        fds = _fds_of(ancillary)
        try:
            if not packet and not fds:
                raise PeerGone("the other process is gone")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise LaneFault("a packet was longer than any message of this channel")
            message = self._decode(packet)
            if len(fds) != message.num_fds:
                raise LaneFault(f"{type(message).__name__} came with {len(fds)} descriptors, not {message.num_fds}")
        except LaneFault:
            close_all(fds)
            raise
        return message, fds

    def hung_up(self) -> bool:
        """Whether the other end is closed, even while messages of it are still unread."""
        return bool(self._hangup.poll(0))

    def close(self) -> None:
        """Closes the socket, which is how the other end learns of it."""
        self._sock.close()

    def _decode(self, packet: bytes) -> Incoming:
        try:
            return self._decoder.decode(packet)
        except msgspec.MsgspecError as error:
            raise LaneFault(f"unreadable message: {error}") from error


def close_all(fds: tuple[int, ...]) -> None:
    """Closes descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)


def _fds_of(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return tuple(fds)
