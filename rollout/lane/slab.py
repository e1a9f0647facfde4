"""The memory of a lane: a sealed memfd with one control page and equal slots.

Owns the control page's layout and the life of the mapping. Invariant: each word of the control page
has exactly one writer at any time, and a slot belongs to the producer while FREE or WRITING and to the
consumer while READY or LEASED; the state word is stored last, so no half-written slot is ever READY.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from enum import IntEnum

from rollout.lane.batch import ABI
from rollout.lane.errors import LaneFault

CONTROL_BYTES = 4096
MAX_SLOTS = 32
_MAGIC = 0x4C414E45_524F4C4C
_RING_ENTRIES = 64
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW: the size can never change under a mapping

# Indices of 8-byte words; what different processes write lies on different cache lines.
_W_MAGIC, _W_ABI, _W_SLOT_BYTES, _W_NUM_SLOTS, _W_EPOCH = range(5)
_W_HEAD = 16
_W_TAIL = 24
_W_RING = 64
_W_STATE = 128
_STATE_STRIDE = 8


class SlotState(IntEnum):
    """Who may touch a slot, and for what."""

    FREE = 0
    WRITING = 1
    READY = 2
    LEASED = 3


class ControlPage:
    """Typed access to the control page. Slot index `num_slots` stands for the one-shot memfd."""

    def __init__(self, view: memoryview) -> None:
        self._words = view.cast("Q")

    def initialise(self, *, num_slots: int, slot_bytes: int, epoch: int) -> None:
        """Producer, once, before the memory is shared."""
        for word, value in ((_W_ABI, ABI), (_W_SLOT_BYTES, slot_bytes), (_W_NUM_SLOTS, num_slots), (_W_EPOCH, epoch)):
            self._words[word] = value
        self._words[_W_MAGIC] = _MAGIC

    def check(self, *, num_slots: int, slot_bytes: int, epoch: int) -> None:
        """Consumer, once: what is mapped is what the socket announced.

        Raises:
            LaneFault: another version, another size or another lane.
        """
        found = tuple(self._words[word] for word in (_W_MAGIC, _W_ABI, _W_SLOT_BYTES, _W_NUM_SLOTS, _W_EPOCH))
        if found != (_MAGIC, ABI, slot_bytes, num_slots, epoch):
            raise LaneFault(f"this is not the lane that was announced (version {ABI}): {found}")

    @property
    def head(self) -> int:
        """Frames ever made ready; the producer's."""
        return self._words[_W_HEAD]

    @property
    def tail(self) -> int:
        """Frames ever taken; the consumer's."""
        return self._words[_W_TAIL]

    def state(self, slot: int) -> tuple[int, SlotState]:
        """Generation and state of a slot."""
        word = self._words[_W_STATE + slot * _STATE_STRIDE]
        return word >> 3, SlotState(word & 7)

    def set_state(self, slot: int, generation: int, state: SlotState) -> None:
        """One aligned 8-byte store, after everything before it."""
        fence()
        self._words[_W_STATE + slot * _STATE_STRIDE] = generation << 3 | state

    def push(self, slot: int) -> None:
        """Producer: the slot, already READY, is the next frame."""
        head = self.head
        self._words[_W_RING + head % _RING_ENTRIES] = slot
        fence()
        self._words[_W_HEAD] = head + 1

    def take(self) -> tuple[int, int] | None:
        """Consumer: (seq, slot) of the next frame, or None where there is none yet."""
        tail = self.tail
        if tail >= self.head:
            return None
        fence()
        slot = self._words[_W_RING + tail % _RING_ENTRIES]
        self._words[_W_TAIL] = tail + 1
        return tail, slot

    def close(self) -> None:
        """Lets go of the mapping."""
        self._words.release()


_fence_lock = threading.Lock()


def fence() -> None:
    """Orders memory accesses of this thread: taking and dropping a lock is a barrier on every CPU."""
    with _fence_lock:
        pass


def create_memfd(name: str, nbytes: int) -> int:
    """A sealed memfd whose memory is really there.

    Raises:
        LaneFault: the host or the cgroup has not that much memory (an error here, not SIGBUS later).
    """
    available = available_memory_bytes()
    if nbytes > available:
        raise LaneFault(f"no shared memory of {nbytes} bytes: the host has {available} available")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise LaneFault(f"no shared memory of {nbytes} bytes: {errno.errorcode.get(error.errno or 0)}") from error
    return fd


def map_memfd(fd: int, nbytes: int, *, offset: int = 0, writable: bool) -> mmap.mmap:
    """Maps part of a memfd that came from `create_memfd` in this or another process.

    Raises:
        LaneFault: it is shorter than announced, or could still shrink.
    """
    if os.fstat(fd).st_size < offset + nbytes or fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
        raise LaneFault("the shared memory is shorter than announced or not sealed")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, protection, offset=offset)


def available_memory_bytes() -> int:
    """The kernel's estimate of what can be had without swapping.

    Asked before the allocation because a memfd has no limit of its own: one that is too large would not
    fail but wake the out-of-memory killer.
    """
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def page_align(nbytes: int) -> int:
    """Rounds up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
