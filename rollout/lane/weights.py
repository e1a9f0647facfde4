"""Weights from the learner to a policy server on the same host: one memfd with two buffers.

Owns the memory and the acknowledgement. Invariant: the buffer that the subscriber acknowledged last
stays untouched until it has acknowledged the next one; versions only grow; a buffer is announced with
the sum of its bytes, and the subscriber refuses one that does not match.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import ClassVar

from rollout.lane.batch import sum64
from rollout.lane.channel import Channel, Message, close_all
from rollout.lane.errors import PeerGone, WeightsFault
from rollout.lane.slab import create_memfd, map_memfd, page_align

_NUM_BUFFERS = 2


class WeightsOpen(Message, frozen=True, kw_only=True):
    """publisher → subscriber, first message: the memory, and the size of the weights in it."""

    num_fds: ClassVar[int] = 1
    nbytes: int


class WeightsReady(Message, frozen=True, kw_only=True):
    """publisher → subscriber: `buffer` holds `version`."""

    version: int
    buffer: int
    nbytes: int
    sum64: int


class WeightsApplied(Message, frozen=True, kw_only=True):
    """subscriber → publisher: the version is in use, or (`error`) it is not and never will be."""

    version: int
    error: str | None = None


class WeightPublisher:
    """The learner's end. Blocking.

    Args:
        sock: SEQPACKET socket whose other end the policy server inherits; owned from here on.
        nbytes: size of the flat weight buffer, a multiple of 4.

    Raises:
        WeightsFault, LaneFault: no memory, or nobody at the other end.
    """

    def __init__(self, sock: socket.socket, nbytes: int) -> None:
        self._channel: Channel[WeightsApplied] = Channel(sock, WeightsApplied)
        self.nbytes = nbytes
        self._buffer_bytes = page_align(nbytes)
        self._active = 0
        self._version = -1
        self._cleanup = ExitStack()
        self._cleanup.callback(self._channel.close)
        total = _NUM_BUFFERS * self._buffer_bytes
        try:
            memfd = create_memfd("rollout-weights", total)
            try:
                self._mapping = map_memfd(memfd, total, writable=True)
                self._cleanup.callback(self._mapping.close)
                self._channel.send(WeightsOpen(nbytes=nbytes), (memfd,))
            finally:
                os.close(memfd)
        except BaseException:
            self._cleanup.close()
            raise

    def publish(self, version: int, write: Callable[[memoryview], None], timeout_s: float) -> None:
        """Writes the idle buffer, announces it and waits until the subscriber uses it.

        Args:
            version: greater than every version before.
            write: fills a writable view of `nbytes` bytes; must keep no reference to it.
            timeout_s: for the acknowledgement.

        Raises:
            PeerGone: the policy server died.
            WeightsFault: it refused the weights, or did not answer in time.
        """
        if version <= self._version:
            raise WeightsFault(f"version {version} is not newer than {self._version}")
        buffer = 1 - self._active
        start = buffer * self._buffer_bytes
        padded = self._buffer_bytes
        with memoryview(self._mapping) as whole, whole[start : start + padded] as view:
            with view[: self.nbytes] as weights:
                write(weights)
            total = sum64(view)
        self._version = version
        self._channel.send(WeightsReady(version=version, buffer=buffer, nbytes=self.nbytes, sum64=total))
        self._await_applied(version, timeout_s)
        self._active = buffer

    def close(self) -> None:
        """Closes the socket and the mapping."""
        self._cleanup.close()

    def _await_applied(self, version: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        while True:
            received = self._channel.receive()
            if received is not None:
                answer = received[0]
                if answer.error is not None:
                    raise WeightsFault(f"the policy server refused version {answer.version}: {answer.error}")
                if answer.version == version:
                    return
                continue  # a late answer to a publish that timed out
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise WeightsFault(f"the policy server did not take version {version} within {timeout_s} s")
            readable.poll(remaining_s * 1000)


class WeightUpdate:
    """One published version, waiting to be applied. Answer it with `ack` or `reject`, once."""

    def __init__(self, channel: Channel[WeightsOpen | WeightsReady], ready: WeightsReady, padded: memoryview) -> None:
        self._channel = channel
        self._ready = ready
        self._padded = padded
        self.version = ready.version

    @property
    def buffer(self) -> memoryview:
        """Read-only flat weights; valid until the next version has been acknowledged."""
        return self._padded[: self._ready.nbytes]

    @property
    def checksum(self) -> str:
        """The announced sum, in hexadecimal."""
        return f"{self._ready.sum64:016x}"

    def verify(self) -> None:
        """Compares the buffer with its announced sum (24 GB/s).

        Raises:
            WeightsFault: they differ.
        """
        if sum64(self._padded) != self._ready.sum64:
            raise WeightsFault(f"version {self.version} arrived damaged")

    def ack(self) -> None:
        """Tells the publisher that this version is in use."""
        self._channel.send(WeightsApplied(version=self.version))

    def reject(self, reason: str) -> None:
        """Tells the publisher that this version will not be used; it raises there."""
        self._channel.send(WeightsApplied(version=self.version, error=reason[:4000]))


class WeightSubscriber:
    """The policy server's end. Never blocks, so it may live on an event loop (`fileno`, `poll`)."""

    def __init__(self, sock: socket.socket) -> None:
        self._channel: Channel[WeightsOpen | WeightsReady] = Channel(sock, WeightsOpen | WeightsReady)
        self._mapping: mmap.mmap | None = None
        self._nbytes = 0

    def fileno(self) -> int:
        """Readable when `poll` has something to say."""
        return self._channel.fileno()

    def poll(self) -> WeightUpdate | None:
        """The next update, or None where nothing waits.

        Raises:
            PeerGone: the learner closed its end; the weights stay as they are.
            LaneFault: a message that makes no sense.
        """
        while True:
            received = self._channel.receive()
            if received is None:
                return None
            message, fds = received
            if isinstance(message, WeightsReady):
                return self._update(message)
            try:
                self._open(message, fds[0])
            finally:
                close_all(fds)

    def close(self) -> None:
        """Closes socket and mapping.

        Raises:
            BufferError: somebody still holds a view of an update's buffer.
        """
        self._channel.close()
        if self._mapping is not None:
            self._mapping.close()

    def _open(self, opening: WeightsOpen, memfd: int) -> None:
        if self._mapping is not None:
            raise WeightsFault("the weight memory was announced twice")
        self._nbytes = opening.nbytes
        self._mapping = map_memfd(memfd, _NUM_BUFFERS * page_align(opening.nbytes), writable=False)

    def _update(self, ready: WeightsReady) -> WeightUpdate:
        if self._mapping is None or ready.nbytes != self._nbytes or ready.buffer not in range(_NUM_BUFFERS):
            raise WeightsFault(f"an announcement that does not fit the weight memory: {ready}")
        padded = page_align(self._nbytes)
        start = ready.buffer * padded
        return WeightUpdate(self._channel, ready, memoryview(self._mapping)[start : start + padded])


__all__ = ["PeerGone", "WeightPublisher", "WeightSubscriber", "WeightUpdate", "WeightsFault"]
