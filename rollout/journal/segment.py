"""The bytes of one segment file, and the difference between torn and damaged.

A segment is an 8-byte magic and records of `[u32 length][u32 crc32 of the payload][payload]`, little
endian. A process that dies while it appends leaves a prefix of its last record: that is a torn
tail, expected, and cut off. A record that is whole but fails its checksum, or a bad length with
whole records behind it, is damage, and raises.

Invariant: what `scan` yields has passed its checksum.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from rollout.errors import JournalFault

MAGIC = b"ROLLJNL1"
HEADER = struct.Struct("<II")
MAX_RECORD_BYTES = 1 << 30


class TornTail(msgspec.Struct, frozen=True):
    """The incomplete record at the end of a segment."""

    path: str
    offset: int
    """Where the whole records end."""
    num_bytes: int
    """How much of the incomplete one was there."""


class Entry(msgspec.Struct, frozen=True):
    """One whole record."""

    offset: int
    payload: memoryview


def frame(payload: bytes) -> bytes:
    """Length, checksum, payload."""
    if len(payload) > MAX_RECORD_BYTES:
        raise JournalFault(f"a record of {len(payload)} bytes exceeds the limit of {MAX_RECORD_BYTES}")
    return HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def read_payload(path: Path, offset: int) -> bytes:
    """The payload of the record at `offset`, its checksum verified.

    Raises:
        JournalFault: there is no whole record.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            length, checksum = HEADER.unpack(file.read(HEADER.size))
            payload = file.read(length)
    except (OSError, struct.error) as error:
        raise JournalFault(f"reading the record at byte {offset} of {path}: {error}") from error
    if len(payload) != length or zlib.crc32(payload) != checksum:
        raise JournalFault(f"{path}: the record at byte {offset} fails its checksum")
    return payload


class SegmentScan:
    """Iterates one segment's records; afterwards `torn` tells about its end.

    Args:
        path: the file.
        last: it is the newest segment, the only one that may end in a torn record.

    Raises (from the iteration):
        JournalFault: the file is damaged or cannot be read.
    """

    def __init__(self, path: Path, *, last: bool) -> None:
        self.path = path
        self.torn: TornTail | None = None
        self._last = last

    def __iter__(self) -> Iterator[Entry]:
        try:
            data = memoryview(self.path.read_bytes())
        except OSError as error:
            raise JournalFault(f"reading {self.path}: {error}") from error
        if bytes(data[: len(MAGIC)]) != MAGIC:
            if self._last and MAGIC.startswith(bytes(data)):
                self.torn = TornTail(str(self.path), 0, len(data))
                return
            raise JournalFault(f"{self.path} does not begin as a journal segment does")
        position = len(MAGIC)
        while position < len(data):
            end = self._end_of_record(data, position)
            if end is None:
                self._tear(data, position)
                return
            yield Entry(position, data[position + HEADER.size : end])
            position = end

    def _end_of_record(self, data: memoryview, position: int) -> int | None:
        """Offset behind the record at `position`; None when it runs past the end of the file."""
        if len(data) - position < HEADER.size:
            return None
        length, checksum = HEADER.unpack_from(data, position)
        end = position + HEADER.size + int(length)
        if end > len(data):
            return None
        if zlib.crc32(data[position + HEADER.size : end]) != checksum:
            raise JournalFault(f"{self.path}: the record at byte {position} fails its checksum")
        return end

    def _tear(self, data: memoryview, position: int) -> None:
        rest = data[position:]
        complete = len(rest) > HEADER.size and zlib.crc32(rest[HEADER.size :]) == HEADER.unpack_from(rest)[1]
        if not self._last or complete or _holds_whole_record(rest[1:]):
            raise JournalFault(f"{self.path}: the length of the record at byte {position} is damaged")
        self.torn = TornTail(str(self.path), position, len(data) - position)


def _holds_whole_record(tail: memoryview) -> bool:
    """Whether a whole record with the right checksum begins anywhere in `tail`.

    A torn record is the last thing written, so nothing whole can follow its beginning.
    """
    raw = np.frombuffer(tail, dtype=np.uint8).astype(np.uint64)
    if len(raw) <= HEADER.size:
        return False
    lengths = raw[:-3] | (raw[1:-2] << np.uint64(8)) | (raw[2:-1] << np.uint64(16)) | (raw[3:] << np.uint64(24))
    offsets = np.arange(len(lengths), dtype=np.uint64)
    candidates = np.flatnonzero((lengths > 0) & (offsets + lengths + np.uint64(HEADER.size) <= np.uint64(len(raw))))
    for offset in candidates.tolist():
        length, checksum = HEADER.unpack_from(tail, offset)
        payload = tail[offset + HEADER.size : offset + HEADER.size + length]
        # Every payload is a msgpack map, which spares most checksums.
        if payload[0] & 0xF0 == 0x80 and zlib.crc32(payload) == checksum:
            return True
    return False
