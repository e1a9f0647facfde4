"""The record format of trees of files; the Python mirror of native/archive.h.

Invariant: `take` gives only what native/archive.c would accept (magic, kind, every length) and raises `ProtocolError`
for anything else; nothing here does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from enum import IntEnum
from typing import NamedTuple

from sandbox.errors import ProtocolError
from sandbox.protocol.wire import MAX_ERRNO

MAGIC = 0x52414C52
MAX_PATH_BYTES = 4000
MAX_NAME_BYTES = 255
BLOCK_BYTES = 65536
PERMISSIONS = 0o777

_HEADER = struct.Struct("<IHHIIQq")
_LENGTH = struct.Struct("<I")


class RecordKind(IntEnum):
    """What a record is; see native/archive.h."""

    END = 0
    FILE = 1
    DIRECTORY = 2
    LINK = 3
    SEAL = 4
    SKIPPED = 5
    FAILED = 6


class Record(NamedTuple):
    """A checked record."""

    kind: RecordKind
    path: str
    mode: int = 0
    error: int = 0
    size: int = 0
    mtime_s: int = 0


def header(record: Record) -> bytes:
    """A record's bytes, without what follows it."""
    path = record.path.encode("utf-8", "surrogateescape")
    head = _HEADER.pack(MAGIC, record.kind, record.mode, len(path), record.error, record.size, record.mtime_s)
    return head + path


def blocks(data: bytes) -> Iterator[bytes]:
    """A piece of a file's content as it stands in the pipe."""
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        yield _LENGTH.pack(len(block)) + block


END_OF_FILE = _LENGTH.pack(0)


def parse(head: bytes) -> tuple[Record, int]:
    """A record from its fixed part, still without its path, and how many bytes that has.

    Raises:
        ProtocolError: it is none.
    """
    magic, kind, mode, path_length, error, size, mtime_s = _HEADER.unpack(head)
    in_range = kind <= max(RecordKind) and mode <= PERMISSIONS and path_length <= MAX_PATH_BYTES
    if magic != MAGIC or not in_range or error > MAX_ERRNO:
        raise ProtocolError("not a record")
    return Record(RecordKind(kind), "", mode, error, size, mtime_s), path_length


Event = Record | bytes | None
"""A record, a piece of the last file's content, or that file's end."""


class RecordReader:
    """Takes bytes as they come and gives what is complete; holds less than one block and one record."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._events: list[Event] = []
        self._steps = self._read()
        self._wanted = next(self._steps)

    def take(self, data: bytes) -> list[Event]:
        """What is complete now.

        Raises:
            ProtocolError: the bytes break the format.
        """
        self._buffer += data
        at = 0
        while self._wanted <= len(self._buffer) - at:
            part = bytes(self._buffer[at : at + self._wanted])
            at += self._wanted
            self._wanted = self._steps.send(part)
        del self._buffer[:at]
        events, self._events = self._events, []
        return events

    def _read(self) -> Generator[int, bytes, None]:
        """Asks for so many bytes, and is sent them; without end, since what follows END is no record."""
        while True:
            record, path_length = parse((yield _HEADER.size))
            path = (yield path_length).decode("utf-8", "surrogateescape")
            self._events.append(record._replace(path=path))
            if record.kind is RecordKind.FILE:
                yield from self._read_content(record.size)

    def _read_content(self, left: int) -> Generator[int, bytes, None]:
        while length := _LENGTH.unpack((yield _LENGTH.size))[0]:
            if length > BLOCK_BYTES or length > left:
                raise ProtocolError(f"a block of {length} bytes where {left} may follow")
            left -= length
            block = yield length  # first: the list is another one afterwards
            self._events.append(block)
        self._events.append(None)
