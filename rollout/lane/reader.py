"""The learner's end of a lane: blocking reads of frames as zero-copy views, and control messages.

Owns its mappings and the received descriptors. Invariant: payload is mapped read-only; a slot goes back
to the producer only after every view of it is gone, so a view never shows another frame's data; the
producer's death is noticed within the recheck period even when a wake-up is lost.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from rollout.lane.batch import ABI, Frame, open_frame
from rollout.lane.channel import Channel, close_all
from rollout.lane.control import EngineMessage, Finish, LaneOpen, LargeFrame, LearnerMessage, PublishNow
from rollout.lane.errors import LaneFault, PeerGone
from rollout.lane.slab import CONTROL_BYTES, ControlPage, SlotState, map_memfd

_RECHECK_S = 1.0
_MAX_WAITING = 64
"""Control messages kept while frames are read first."""


class LaneReader:
    """Consumer of one lane; a context manager. Blocking, for a process without an event loop.

    Args:
        sock: the learner's end of the socket pair; owned by the reader from here on.
        timeout_s: how long to wait for the engine to open the lane.

    Raises:
        PeerGone: the engine is gone.
        LaneFault: the lane was not opened in time, or is of another version.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float = 60.0) -> None:
        self._channel: Channel[EngineMessage] = Channel(sock, EngineMessage)
        self._waiting: deque[PublishNow | Finish] = deque()
        self._large: dict[int, tuple[int, int]] = {}
        self._cleanup = ExitStack()
        self._cleanup.callback(self._channel.close)
        self._wakeup = select.poll()
        self._wakeup.register(self._channel, select.POLLIN)
        try:
            self._open(timeout_s)
        except BaseException:
            self._cleanup.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps and closes everything.

        Raises:
            BufferError: a view of a frame is still alive; the mapping then stays, and nothing crashes.
        """
        with self._cleanup:
            for fd, _ in self._large.values():
                os.close(fd)
            self._large.clear()

    def send(self, message: LearnerMessage, *, timeout_s: float = 10.0) -> None:
        """Sends a control message to the engine; errors as `Channel.send`."""
        self._channel.send(message, timeout_s=timeout_s)

    def wait(self, timeout_s: float) -> PublishNow | Finish | None:
        """Waits until something is to be done: returns a control message, or None for a ready frame.

        Frames come first: a message is returned only when no frame that was written before it waits.

        Raises:
            PeerGone: the engine is gone and nothing is left to read.
            TimeoutError: nothing came.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            gone = self._pump()
            if self._page.head > self._page.tail:
                return None
            if self._waiting:
                return self._waiting.popleft()
            if gone:
                raise PeerGone("the engine is gone")
            self._sleep(deadline)

    @contextmanager
    def lease(self, timeout_s: float) -> Iterator[Frame]:
        """The next frame, as views that are valid inside the `with` block only.

        Raises:
            TimeoutError: no frame came.
            PeerGone: the engine is gone and no frame is left.
            FrameDamaged: the frame must not be used; its slot stays taken.
            BufferError: at the end of the block, a view is still referenced somewhere; the slot is then
                never given back. When the block itself raised, its own exception wins.
        """
        seq, slot = self._next(time.monotonic() + timeout_s)
        generation, state = self._page.state(slot)
        if state is not SlotState.READY:
            raise LaneFault(f"slot {slot} is {state.name} where it should be ready")
        self._page.set_state(slot, generation, SlotState.LEASED)
        mapping, start, nbytes = self._memory(seq, slot)
        view = memoryview(mapping)[start : start + nbytes]
        frame = open_frame(view, generation=generation, seq=seq)
        try:
            yield frame
        except BaseException:
            if frame.release():
                self._give_back(slot, generation, mapping, view)
            raise
        if not frame.release():
            raise BufferError("a view of a frame outlives its lease")
        self._give_back(slot, generation, mapping, view)

    def _give_back(self, slot: int, generation: int, mapping: mmap.mmap, view: memoryview) -> None:
        view.release()
        if slot == self._num_slots:
            mapping.close()
        self._page.set_state(slot, generation, SlotState.FREE)
        os.eventfd_write(self._free, 1)

    def _next(self, deadline: float) -> tuple[int, int]:
        while True:
            taken = self._page.take()
            if taken is not None:
                return taken
            gone = self._pump()
            if gone and self._page.head == self._page.tail:
                raise PeerGone("the engine is gone")
            if self._page.head == self._page.tail:
                self._sleep(deadline)

    def _memory(self, seq: int, slot: int) -> tuple[mmap.mmap, int, int]:
        """Mapping, start and length of a frame's memory."""
        if slot < self._num_slots:
            return self._slots, slot * self._slot_bytes, self._slot_bytes
        self._pump()
        fd, nbytes = self._large.pop(seq)
        try:
            return map_memfd(fd, nbytes, writable=False), 0, nbytes
        finally:
            os.close(fd)

    def _sleep(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("nothing came through the lane")
        self._wakeup.poll(1000 * min(remaining_s, _RECHECK_S))
        try:
            os.eventfd_read(self._ready)
        except BlockingIOError:
            return  # woken by the socket, or to look again

    def _pump(self) -> bool:
        """Takes every waiting message off the socket; True when the engine is gone."""
        while len(self._waiting) < _MAX_WAITING:
            try:
                received = self._channel.receive()
            except PeerGone:
                return True
            if received is None:
                return False
            message, fds = received
            if isinstance(message, LargeFrame):
                self._large[message.seq] = (fds[0], message.nbytes)
            elif isinstance(message, PublishNow | Finish):
                self._waiting.append(message)
            else:
                close_all(fds)
                raise LaneFault("the lane was opened twice")
        return False

    def _open(self, timeout_s: float) -> None:
        if not self._wakeup.poll(timeout_s * 1000):
            raise LaneFault(f"the engine opened no lane within {timeout_s} s")
        received = self._channel.receive()
        if received is None:
            raise LaneFault("the engine's first message vanished")
        opening, fds = received
        if not isinstance(opening, LaneOpen):
            close_all(fds)
            raise LaneFault(f"the engine's first message is {type(opening).__name__}, which opens no lane")
        memfd, self._ready, self._free = fds
        self._cleanup.callback(close_all, (self._ready, self._free))
        try:
            self._map(opening, memfd)
        finally:
            os.close(memfd)
        self._wakeup.register(self._ready, select.POLLIN)

    def _map(self, opening: LaneOpen, memfd: int) -> None:
        if opening.abi != ABI:
            raise LaneFault(f"the engine speaks version {opening.abi} of the lane, this learner {ABI}")
        self._num_slots, self._slot_bytes = opening.num_slots, opening.slot_bytes
        control = map_memfd(memfd, CONTROL_BYTES, writable=True)
        self._cleanup.callback(control.close)
        self._page = ControlPage(memoryview(control))
        self._cleanup.callback(self._page.close)
        self._page.check(num_slots=opening.num_slots, slot_bytes=opening.slot_bytes, epoch=opening.epoch)
        payload_bytes = self._num_slots * self._slot_bytes
        self._slots = map_memfd(memfd, payload_bytes, offset=CONTROL_BYTES, writable=False)
        self._cleanup.callback(self._slots.close)
