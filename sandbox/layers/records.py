"""The stream in which a workspace is sealed; the Python mirror of native/layers.h.

Invariant: `take` gives only well-formed, plausible records, of names that stay below their root and lie in a directory
that came before, and refuses everything else with `ProtocolError`: the sender reads a tree of hostile making.
"""

from __future__ import annotations

import stat
from collections.abc import Generator
from enum import IntEnum
from typing import NamedTuple

from sandbox.errors import ProtocolError
from sandbox.files.reading import HEADER, StepReader
from sandbox.layers.nodes import parent_of
from sandbox.layers.types import SpecialKind
from sandbox.protocol.wire import MAX_ERRNO

MAGIC = 0x594C4C52
OPAQUE = 0x8000
PERMISSIONS = 0o1777
MAX_PATH_BYTES = 4000
MAX_NAME_BYTES = 255
MAX_TARGET_BYTES = 4095
MAX_LEVELS = 256
"""Trees are removed level by level, each with a frame of its own."""
MAX_TIME_S = 1 << 33
_BILLION = 1_000_000_000


class RecordKind(IntEnum):
    """What a record is; see native/layers.h."""

    END = 0
    FILE = 1
    DIRECTORY = 2
    LINK = 3
    DELETED = 4
    SPECIAL = 5
    FAILED = 6


class Record(NamedTuple):
    """A checked record."""

    kind: RecordKind
    path: bytes
    mode: int = 0
    opaque: bool = False
    mtime_ns: int = 0
    size: int = 0
    target: bytes = b""
    error: int = 0


class RecordReader(StepReader[Record]):
    """Takes bytes as they come and gives what is complete; holds less than one block and one record of them."""

    def __init__(self) -> None:
        self._directories: set[bytes] = set()
        self._names: set[bytes] = set()
        super().__init__()

    def _read(self) -> Generator[int, bytes, None]:
        while True:
            magic, kind, mode, path_length, nanoseconds, size, mtime_s = HEADER.unpack((yield HEADER.size))
            if magic != MAGIC or kind > max(RecordKind) or path_length > MAX_PATH_BYTES:
                raise ProtocolError("not a record of a layer")
            record = Record(RecordKind(kind), (yield path_length), mode, False, 0, size)
            if record.kind is RecordKind.FAILED:
                self._events.append(record._replace(error=min(nanoseconds, MAX_ERRNO)))
                continue
            if record.kind is RecordKind.END:
                self._events.append(record)
                continue
            self._check_name(record)
            record = _check_facts(record, nanoseconds, mtime_s)
            if record.kind is RecordKind.LINK:
                record = record._replace(target=_check_target((yield record.size)))
            self._events.append(record)
            if record.kind is RecordKind.FILE:
                yield from self._read_content(record.size)

    def _check_name(self, record: Record) -> None:
        path = record.path
        name = path[path.rfind(b"/") + 1 :]
        is_root = path == b"" and record.kind is RecordKind.DIRECTORY and not self._names
        if not is_root:
            if name in (b"", b".", b"..") or len(name) > MAX_NAME_BYTES or b"\0" in name:
                raise ProtocolError("a name that cannot be")
            if parent_of(path) not in self._directories or path.startswith(b"/"):
                raise ProtocolError("a name in no directory that came before")
        if path.count(b"/") >= MAX_LEVELS:
            raise ProtocolError(f"a path of more than {MAX_LEVELS} levels")
        if path in self._names:
            raise ProtocolError("a name that comes twice")
        self._names.add(path)
        if record.kind is RecordKind.DIRECTORY:
            self._directories.add(path)


def _check_facts(record: Record, nanoseconds: int, mtime_s: int) -> Record:
    opaque = bool(record.mode & OPAQUE) and record.kind is RecordKind.DIRECTORY
    mode = record.mode & ~OPAQUE if opaque else record.mode
    if mode > PERMISSIONS or nanoseconds >= _BILLION or (record.kind is RecordKind.SPECIAL and mode > 0o17):
        raise ProtocolError("a record with facts that cannot be")
    if record.kind is RecordKind.LINK and not 0 < record.size <= MAX_TARGET_BYTES:
        raise ProtocolError("a link of absurd length")
    mtime_ns = min(max(0, mtime_s), MAX_TIME_S) * _BILLION + nanoseconds
    return record._replace(mode=mode, opaque=opaque, mtime_ns=mtime_ns)


def _check_target(target: bytes) -> bytes:
    if b"\0" in target:
        raise ProtocolError("a link to a name that cannot be")
    return target


def encode(record: Record) -> bytes:
    """A record's bytes, with a link's target and without a file's content."""
    seconds, nanoseconds = divmod(record.mtime_ns, _BILLION)
    mode = record.mode | (OPAQUE if record.opaque else 0)
    size = len(record.target) if record.kind is RecordKind.LINK else record.size
    head = HEADER.pack(MAGIC, record.kind, mode, len(record.path), nanoseconds, size, seconds)
    return head + record.path + record.target


SPECIAL_KINDS: dict[int, SpecialKind] = {
    stat.S_IFIFO >> 12: "fifo",
    stat.S_IFSOCK >> 12: "socket",
    stat.S_IFCHR >> 12: "device",
    stat.S_IFBLK >> 12: "device",
}
"""By what a SPECIAL record has for a mode."""
