"""The record format of trees of files; the Python mirror of native/archive.h.

Invariant: `take` gives only what native/archive.c would accept (magic, kind, every length) and raises `ProtocolError`
for anything else; nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from enum import IntEnum
from typing import NamedTuple

from sandbox.errors import ProtocolError
from sandbox.files.reading import BLOCK_BYTES, HEADER, LENGTH, StepReader
from sandbox.protocol.wire import MAX_ERRNO

MAGIC = 0x52414C52
MAX_PATH_BYTES = 4000
MAX_NAME_BYTES = 255
PERMISSIONS = 0o777


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
    head = HEADER.pack(MAGIC, record.kind, record.mode, len(path), record.error, record.size, record.mtime_s)
    return head + path


def blocks(data: bytes) -> Iterator[bytes]:
    """A piece of a file's content as it stands in the pipe."""
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        yield LENGTH.pack(len(block)) + block


def parse(head: bytes) -> tuple[Record, int]:
    """A record from its fixed part, still without its path, and how many bytes that has.

    Raises:
        ProtocolError: it is none.
    """
    magic, kind, mode, path_length, error, size, mtime_s = HEADER.unpack(head)
    in_range = kind <= max(RecordKind) and mode <= PERMISSIONS and path_length <= MAX_PATH_BYTES
    if magic != MAGIC or not in_range or error > MAX_ERRNO:
        raise ProtocolError("not a record")
    return Record(RecordKind(kind), "", mode, error, size, mtime_s), path_length


class RecordReader(StepReader[Record]):
    """Takes bytes as they come and gives what is complete; holds less than one block and one record."""

    def _read(self) -> Generator[int, bytes, None]:
        """Without end, since what follows END is no record."""
        while True:
            record, path_length = parse((yield HEADER.size))
            path = (yield path_length).decode("utf-8", "surrogateescape")
            self._events.append(record._replace(path=path))
            if record.kind is RecordKind.FILE:
                yield from self._read_content(record.size)
