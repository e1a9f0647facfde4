"""Frames between engine, warden and agent; the Python mirror of native/wire.h.

Invariant: `decode` accepts exactly what the C side accepts (magic, version, every length) and raises
`ProtocolError` for anything else; nothing here does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from sandbox.errors import ProtocolError

MAGIC = 0x56574C52
VERSION = 1
MAX_FRAME_BYTES = 192 * 1024
MAX_FDS = 64
MAX_STRINGS = 4096

MAX_ERRNO = 4095
_MAX_STATUS = 0xFFFF
_MAX_AMOUNT = 1 << 53  # microseconds (centuries) or bytes: exact as a float, too
_HEADER = struct.Struct("<IHHII")
_ITEM = struct.Struct("<HHI")
_U32 = struct.Struct("<I")
_RLIMIT = struct.Struct("<IIQQ")
_RESULT = struct.Struct("<IIQQQQQ")
_SPACE = struct.Struct("<QQII")
_CAPS = struct.Struct("<QQ")
_RESIDUE = struct.Struct("<IIIII")
_HELD = struct.Struct("<IIQQQ")


class Kind(IntEnum):
    """What a frame is; see native/wire.h for who sends which to whom."""

    OWN = 1
    START = 2
    RELEASE = 3
    RENEW = 4
    HELLO = 17
    STARTED = 18
    FAILED = 19
    RELEASED = 20
    DIED = 21
    RENEWED = 22
    RUN = 33
    KILL = 34
    PUT = 35
    GET = 36
    STAT = 40
    UNPACK = 41
    PACK = 42
    CLEAN = 43
    PING = 44
    EXITED = 49
    OPENED = 50
    REFUSED = 51
    SPACE = 56
    CLEANED = 57
    PONG = 58
    SEAL = 45
    SEALED = 46
    PREPARE = 80
    INTERRUPT = 81
    SWEEP = 82
    LOOK = 83
    DROP = 84
    HELD = 85


class Tag(IntEnum):
    """What an item is."""

    ARGV = 1
    ENV = 2
    CWD = 3
    RLIMIT = 4
    STDIO = 5
    KEEPER = 6
    PATH = 7
    MODE = 8
    DIR = 9
    SET = 10
    JOIN = 11
    IDS = 12
    OPEN = 13
    AT = 14
    TMPFS = 15
    BIND = 16
    KILL = 17
    REMOVE = 18
    TEXT = 19
    ERRNO = 20
    RESULT = 21
    COVER = 24
    SEAL = 25
    DEVICE = 26
    OVERLAY = 27
    SHOW = 28
    DROP = 29
    READ_ONLY = 30
    MASK = 31
    NODE = 32
    SPACE = 40
    CAPS = 41
    RESIDUE = 60
    PLACES = 61
    LAYER = 65
    LAYERED = 66
    HOLDER = 75
    HELD = 76


class Result(NamedTuple):
    """How a command ended, as the agent saw it."""

    status: int
    """As wait(2) gives it."""
    setup_errno: int
    """Not 0: our own preparation of the command failed."""
    user_us: int
    system_us: int
    max_rss_bytes: int
    free_blocks: int
    free_inodes: int


class Space(NamedTuple):
    """What the agent counts in its namespaces."""

    used_bytes: int
    used_inodes: int
    num_processes: int
    """Without the agent and its own helpers."""
    zero: int


class Residue(NamedTuple):
    """What a lease has left inside; all zero: nothing."""

    num_processes: int
    num_ipc: int
    """System V objects that could not be removed."""
    num_sockets: int
    network: int
    """1: a counter of the network namespace is not what it was when the jail was built."""
    touched: int
    """1: the writable mounts are not as they were when the lease began, and must be made anew."""


class Held(NamedTuple):
    """What the holder of a session answers."""

    pid: int
    """Its own, inside."""
    num_left: int
    """Processes that a signal was sent to; after a sweep, of its last look."""
    cpu_us: int
    """Of the shell and the children that it waited for."""
    free_blocks: int
    free_inodes: int


Item = tuple[Tag, bytes]


def text(tag: Tag, *strings: str) -> Item:
    """An item of one or more NUL-terminated strings."""
    return tag, b"".join(string.encode("utf-8", "surrogateescape") + b"\0" for string in strings)


def number(tag: Tag, *values: int) -> Item:
    """An item of unsigned 32-bit numbers."""
    return tag, b"".join(map(_U32.pack, values))


def numbered(tag: Tag, value: int, *strings: str) -> Item:
    """An item of one number and strings after it."""
    return tag, _U32.pack(value) + text(tag, *strings)[1]


def rlimit(resource: int, soft: int, hard: int) -> Item:
    """A resource limit; the agent cuts it to its own hard limit."""
    return Tag.RLIMIT, _RLIMIT.pack(resource, 0, soft, hard)


def caps_item(num_bytes: int, num_entries: int) -> Item:
    """How much a helper may send."""
    return Tag.CAPS, _CAPS.pack(num_bytes, num_entries)


def encode(kind: Kind, ident: int, items: Iterable[Item] = ()) -> bytes:
    """One frame.

    Raises:
        ProtocolError: the frame would be longer than the other side accepts.
    """
    parts = [b""]
    for tag, value in items:
        parts.append(_ITEM.pack(tag, 0, len(value)))
        parts.append(value)
    body = b"".join(parts)
    if _HEADER.size + len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(MAGIC, VERSION, kind, ident, len(body)) + body


class Frame(NamedTuple):
    """A checked frame; `items` holds raw tags, for the other side may be of hostile making."""

    kind: int
    ident: int
    items: tuple[tuple[int, bytes], ...]
    lost: bool = False
    """It came with descriptors that this process has no room for; none of them is there."""

    def value(self, tag: Tag) -> bytes | None:
        """The first item of that tag."""
        return next((value for found, value in self.items if found == tag), None)

    def number(self, tag: Tag, default: int = 0) -> int:
        """The first item of that tag as a number, or `default` where there is none."""
        value = self.value(tag)
        if value is None:
            return default
        if len(value) != _U32.size:
            raise ProtocolError(f"item {tag.name} has {len(value)} bytes instead of 4")
        return int(_U32.unpack(value)[0])

    def errno(self, default: int = 0) -> int:
        """The ERRNO item, or `default` where there is none; never a number that is no errno."""
        code = self.number(Tag.ERRNO, default)
        if code > MAX_ERRNO:
            raise ProtocolError(f"{code} is no errno")
        return code

    def result(self) -> Result:
        """The command result of an EXITED frame; its numbers are such as a kernel gives."""
        value = self.value(Tag.RESULT)
        if value is None or len(value) != _RESULT.size:
            raise ProtocolError("a frame without a well-formed result")
        result = Result(*_RESULT.unpack(value))
        if result.status > _MAX_STATUS or result.setup_errno > MAX_ERRNO or max(result[2:5]) > _MAX_AMOUNT:
            raise ProtocolError(f"a result that cannot be: {result}")
        return result

    def held(self) -> Held:
        """The answer of a HELD frame."""
        value = self.value(Tag.HELD)
        if value is None or len(value) != _HELD.size:
            raise ProtocolError("a frame without a well-formed answer")
        held = Held(*_HELD.unpack(value))
        if held.cpu_us > _MAX_AMOUNT:
            raise ProtocolError(f"an answer that cannot be: {held}")
        return held

    def space(self) -> Space:
        """The counts of a SPACE frame."""
        value = self.value(Tag.SPACE)
        if value is None or len(value) != _SPACE.size:
            raise ProtocolError("a frame without well-formed counts")
        return Space(*_SPACE.unpack(value))

    def residue(self) -> Residue:
        """What a CLEANED frame tells."""
        value = self.value(Tag.RESIDUE)
        if value is None or len(value) != _RESIDUE.size:
            raise ProtocolError("a frame without a well-formed residue")
        return Residue(*_RESIDUE.unpack(value))


def _items(body: memoryview) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(body):
        if len(body) - at < _ITEM.size:
            raise ProtocolError("a frame ends inside an item's header")
        tag, zero, length = _ITEM.unpack_from(body, at)
        at += _ITEM.size
        if zero or length > len(body) - at:
            raise ProtocolError(f"an item of {length} bytes where {len(body) - at} are left")
        yield tag, bytes(body[at : at + length])
        at += length


def decode(data: bytes) -> Frame:
    """Checks and takes apart one frame.

    Raises:
        ProtocolError: anything that native/wire.c would refuse.
    """
    if len(data) < _HEADER.size:
        raise ProtocolError(f"a frame of {len(data)} bytes has no header")
    magic, version, kind, ident, length = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError(f"magic {magic:#x}, version {version}: not this wire format")
    if length != len(data) - _HEADER.size:
        raise ProtocolError(f"a frame says {length} bytes and has {len(data) - _HEADER.size}")
    return Frame(kind, ident, tuple(_items(memoryview(data)[_HEADER.size :])))
