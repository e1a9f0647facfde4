"""The engine's end of a lane: writes frames, suspends on back-pressure, exchanges control messages.

Owns the slab, both eventfds and the socket. Invariant: a frame is either wholly READY or was never
there (cancellation included), frames become ready in the order of `write` calls, and nothing is dropped.
The event loop never copies payload: filling happens in one thread that often lets go of the interpreter.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread

from rollout.lane.batch import ABI, FrameParts, write_frame
from rollout.lane.channel import Channel, Message
from rollout.lane.control import EngineMessage, LaneOpen, LargeFrame, LearnerMessage
from rollout.lane.errors import LaneFault, PeerGone
from rollout.lane.slab import (
    CONTROL_BYTES,
    MAX_SLOTS,
    ControlPage,
    SlotState,
    create_memfd,
    map_memfd,
    page_align,
)

_RECHECK_S = 0.5
"""How often a suspended writer looks for itself whether the learner lives and a slot is free."""
_PACE_S = 50e-6
"""Pause of the filling thread between pieces, long enough that the event loop gets the interpreter."""


@dataclass(slots=True)
class LaneStats:
    """Counters of one lane."""

    num_frames: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    wait_s: float = 0.0
    """Time suspended on back-pressure."""
    fill_s: float = 0.0
    """Time in the filling thread."""


class LaneWriter:
    """Producer of one lane; an async context manager.

    Args:
        sock: the engine's end of a SEQPACKET socket pair whose other end the learner inherits; owned
            by the writer from here on.
        slots: slots of the slab, at most 32.
        slot_bytes: bytes of one slot; all of the slab is committed memory from the start.
    """

    def __init__(self, sock: socket.socket, *, slots: int = 8, slot_bytes: int = 16 << 20) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise LaneFault(f"{slots} slots: a lane has 1 to {MAX_SLOTS}")
        self._channel: Channel[LearnerMessage] = Channel(sock, LearnerMessage)
        self._num_slots = slots
        self._slot_bytes = page_align(slot_bytes)
        self._lock = anyio.Lock()
        self._sending = anyio.Lock()
        self._limiter = anyio.CapacityLimiter(1)
        self._cleanup = ExitStack()
        self._cleanup.callback(self._channel.close)
        self.stats = LaneStats()

    async def __aenter__(self) -> Self:
        """Makes the slab and sends it.

        Raises:
            LaneFault: no memory, or no learner at the other end.
        """
        try:
            await anyio.to_thread.run_sync(self._open)
        except BaseException:
            self._cleanup.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the socket, so that the learner sees the end of the lane, and frees the memory."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                self._cleanup.close()

    async def write(self, parts: FrameParts, *, timeout_s: float = 1800.0) -> None:
        """Writes one frame; suspends while no slot is free. Concurrent calls are served in order.

        Cancellation before the filling starts leaves no trace; afterwards the frame is committed and
        cancellation is delivered at the caller's next checkpoint.

        Raises:
            PeerGone: the learner died.
            LaneFault: the learner freed nothing for `timeout_s`.
        """
        async with self._lock:
            large = parts.nbytes > self._slot_bytes
            slot = await self._free_slot(range(self._num_slots, self._num_slots + 1) if large else None, timeout_s)
            fill = self._write_large if large else self._write_slot
            await anyio.to_thread.run_sync(fill, parts, slot, limiter=self._limiter)

    async def send(self, message: EngineMessage, *, timeout_s: float = 10.0) -> None:
        """Sends a control message.

        Raises:
            PeerGone: the learner died.
            TimeoutError: the learner read no message for `timeout_s`.
        """
        await self._send(message, (), timeout_s)

    async def receive(self) -> LearnerMessage:
        """Next message of the learner; waits without limit, so give it a scope. One caller at a time.

        Raises:
            PeerGone: the learner died and all its messages have been received.
        """
        while True:
            received = self._channel.receive()
            if received is not None:
                return received[0]
            await anyio.wait_readable(self._channel.fileno())

    @property
    def num_unread(self) -> int:
        """Frames that the learner has not begun to read."""
        return self._page.head - self._page.tail

    def _open(self) -> None:
        nbytes = CONTROL_BYTES + self._num_slots * self._slot_bytes
        memfd = create_memfd("rollout-lane", nbytes)
        self._cleanup.callback(os.close, memfd)
        self._ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._cleanup.callback(os.close, self._ready)
        self._free = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._cleanup.callback(os.close, self._free)
        mapping = map_memfd(memfd, nbytes, writable=True)
        self._cleanup.callback(mapping.close)
        self._view = memoryview(mapping)
        self._cleanup.callback(self._view.release)
        epoch = secrets.randbits(63)
        control = self._view[:CONTROL_BYTES]
        self._cleanup.callback(control.release)
        self._page = ControlPage(control)
        self._cleanup.callback(self._page.close)
        self._page.initialise(num_slots=self._num_slots, slot_bytes=self._slot_bytes, epoch=epoch)
        opening = LaneOpen(abi=ABI, num_slots=self._num_slots, slot_bytes=self._slot_bytes, epoch=epoch)
        self._channel.send(opening, (memfd, self._ready, self._free))

    async def _free_slot(self, candidates: range | None, timeout_s: float) -> int:
        """First free slot; suspends until there is one."""
        began = time.monotonic()
        while True:
            if self._channel.hung_up():
                raise PeerGone("the learner is gone: nobody reads the lane")
            for slot in candidates or range(self._num_slots):
                if self._page.state(slot)[1] is SlotState.FREE:
                    self.stats.wait_s += time.monotonic() - began
                    return slot
            if time.monotonic() - began > timeout_s:
                raise LaneFault(f"the learner freed no slot for {timeout_s} s")
            with anyio.move_on_after(_RECHECK_S):
                await anyio.wait_readable(self._free)
                _drain(self._free)

    def _write_slot(self, parts: FrameParts, slot: int) -> None:
        start = CONTROL_BYTES + slot * self._slot_bytes
        with self._view[start : start + self._slot_bytes] as view:
            self._fill(view, parts, slot)
        self._commit(parts, slot)

    def _write_large(self, parts: FrameParts, slot: int) -> None:
        nbytes = page_align(parts.nbytes)
        memfd = create_memfd("rollout-frame", nbytes)
        try:
            with map_memfd(memfd, nbytes, writable=True) as mapping, memoryview(mapping) as view:
                self._fill(view, parts, slot)
            # The descriptor goes first: whoever sees the frame in the ring finds it on the socket.
            self._channel.send(LargeFrame(seq=self._page.head, nbytes=nbytes), (memfd,))
            self._commit(parts, slot)
        finally:
            os.close(memfd)

    def _fill(self, view: memoryview, parts: FrameParts, slot: int) -> None:
        """Writes one frame; on an error the slot is free again and nothing was announced."""
        began = time.monotonic()
        generation = self._page.state(slot)[0] + 1
        self._page.set_state(slot, generation, SlotState.WRITING)
        try:
            for _ in write_frame(view, parts, generation=generation, seq=self._page.head):
                time.sleep(_PACE_S)
        except BaseException:
            self._page.set_state(slot, generation, SlotState.FREE)
            raise
        self.stats.fill_s += time.monotonic() - began

    def _commit(self, parts: FrameParts, slot: int) -> None:
        generation, _ = self._page.state(slot)
        self._page.set_state(slot, generation, SlotState.READY)
        self._page.push(slot)
        os.eventfd_write(self._ready, 1)
        self.stats.num_frames += 1
        self.stats.num_tokens += parts.counts.num_tokens
        self.stats.num_bytes += parts.nbytes

    async def _send(self, message: Message, fds: tuple[int, ...], timeout_s: float) -> None:
        async with self._sending:
            with anyio.fail_after(timeout_s):
                while not self._channel.try_send(message, fds):
                    await anyio.wait_writable(self._channel.fileno())


def _drain(eventfd: int) -> None:
    try:
        os.eventfd_read(eventfd)
    except BlockingIOError:
        return  # another wake-up was read in between
