"""From a tar to records: what a caller gives, checked before the inside sees any of it.

Invariant: a member is passed on only when its name stays inside, it is a regular file or a directory, and the sum of
all sizes and the number of all members so far are below the caps; the source is read forward, and a member's headers
are bounded.
"""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from sandbox.errors import ConfigError
from sandbox.files.caps import FullCaps
from sandbox.files.names import Names
from sandbox.files.reading import BLOCK_BYTES, END_OF_FILE
from sandbox.files.records import PERMISSIONS, Record, RecordKind, blocks, header

HEADER_BYTES = 1 << 20
"""Most that one member's headers may hold; a name of a megabyte is no honest tar's."""
_SKIP_BYTES = 1 << 20
_BATCH_BYTES = 256 * 1024
_BATCH_S = 0.1
_MAX_TIME_S = 1 << 33


class Tally:
    """What has been passed on so far."""

    def __init__(self) -> None:
        self.num_files = 0
        self.num_directories = 0
        self.num_bytes = 0


class Forward(io.RawIOBase):
    """A source that is only read forward, one byte of going back apart; bounds what is read as headers."""

    def __init__(self, source: BinaryIO) -> None:
        super().__init__()
        self._source = source
        self._at = 0
        self._kept = b""
        self._header_left: int | None = None
        self.last = b""

    def limit(self, num_bytes: int | None) -> None:
        """How much the next reads may ask for together; None for no limit."""
        self._header_left = num_bytes

    def read(self, size: int = -1) -> bytes:
        if self._header_left is not None:
            self._header_left -= size
            if size < 0 or self._header_left < 0:
                raise ConfigError("source", "tar", "has a header of absurd length; write a plain tar")
        return self._take(size)

    def _take(self, size: int) -> bytes:
        if size == 0:
            return b""
        parts, self._kept = [self._kept], b""
        got = len(parts[0])
        while got < size and (part := self._source.read(size - got)):
            parts.append(part)
            got += len(part)
        self.last = b"".join(parts)
        self._at += got
        return self.last

    def tell(self) -> int:
        return self._at

    def seek(self, target: int, whence: int = 0) -> int:
        if target == self._at - 1 and self.last and not self._kept:
            self._kept, self._at = self.last[-1:], target
        if whence or target < self._at:
            raise ConfigError("source", "tar", "leads backwards; write a plain tar")
        while self._at < target and self._take(min(target - self._at, _SKIP_BYTES)):
            continue
        return self._at


def tar_records(source: BinaryIO, caps: FullCaps, tally: Tally, *, content: bool = True) -> Iterator[bytes]:
    """The bytes for the pipe, in pieces of about a block.

    Args:
        content: False to look at the headers alone, and at where the content ends.
        tally: counts what is passed on.

    Raises:
        ConfigError: not a plain tar, or a member that may not go in; names it.
    """
    directories: list[Record] = []
    names = Names(caps.max_entries)
    members_left = caps.max_entries + 1  # the root may be one of them
    forward = Forward(source)
    forward.limit(HEADER_BYTES)
    try:
        with tarfile.open(fileobj=forward, mode="r:", errors="surrogateescape", encoding="utf-8") as tar:
            while (member := next_member(tar, forward)) is not None:
                name = _check(member, names)
                members_left -= 1
                if members_left < 0:  # of few names, or the root again and again
                    raise ConfigError("source", name, f"is one of more than {caps.max_entries} members")
                if not name:
                    yield b""
                elif member.isdir():
                    tally.num_directories += 1
                    directories.append(_record(RecordKind.SEAL, name, member))
                    yield header(_record(RecordKind.DIRECTORY, name, member))
                else:
                    tally.num_files += 1
                    tally.num_bytes += member.size
                    if tally.num_bytes > caps.max_bytes:
                        raise ConfigError(
                            "source", name, f"brings the tar over {caps.max_bytes} bytes; raise max_bytes"
                        )
                    yield header(_record(RecordKind.FILE, name, member))
                    if content:
                        yield from _content(tar, member)
        if forward.last != bytes(tarfile.BLOCKSIZE):
            raise ConfigError("source", "tar", "is cut off or damaged: it does not end as a tar ends")
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError("source", "tar", f"cannot be read as a plain (uncompressed) tar: {error}") from None
    for record in reversed(directories):  # deepest first: a read-only directory is closed when it is full
        yield header(record)
    yield header(Record(RecordKind.END, ""))


def next_member(tar: tarfile.TarFile, forward: Forward) -> tarfile.TarInfo | None:
    """The next member, its headers read within their bound."""
    forward.limit(HEADER_BYTES)
    tar.members.clear()  # type: ignore[attr-defined]  # documented nowhere, and kept by all versions: else it only grows
    member = tar.next()
    forward.limit(None)
    return member


def _check(member: tarfile.TarInfo, names: Names) -> str:
    """The member's clean name; '' for the root itself."""
    name = names.clean(member.name)
    if name is None:
        raise ConfigError("source", member.name, "must be a relative path without `..` and NUL")
    if not (member.isreg() or member.isdir()):
        raise ConfigError("source", name, "is neither a regular file nor a directory; leave links and devices out")
    if member.issparse():
        raise ConfigError("source", name, "is stored as a sparse file; write a plain tar")
    if member.size < 0 or (not name and member.isreg()):
        raise ConfigError("source", name, "is no file of a plain tar")
    wrong = names.add(name, "directory" if member.isdir() else "file") if name else None
    if wrong is not None:
        raise ConfigError("source", name, wrong)
    return name


def _record(kind: RecordKind, name: str, member: tarfile.TarInfo) -> Record:
    mtime_s = min(max(0, int(member.mtime)), _MAX_TIME_S) if member.mtime < float(_MAX_TIME_S) else _MAX_TIME_S
    size = member.size if kind is RecordKind.FILE else 0
    return Record(kind, name, member.mode & PERMISSIONS, 0, size, mtime_s)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    content = tar.extractfile(member)
    assert content is not None, "a regular file has content"
    left = member.size
    while left > 0:
        data = content.read(min(left, BLOCK_BYTES))
        if not data:
            raise ConfigError("source", member.name, "is cut off: the tar ends inside it")
        left -= len(data)
        yield from blocks(data)
    yield END_OF_FILE


def batched(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in larger pieces, so that a hand-over to another thread carries more.

    A slow or empty source gives what there is (which may be nothing) after a while, so that its reader is not held.
    """
    batch = bytearray()
    begun_s = time.monotonic()
    for piece in pieces:
        batch += piece
        if len(batch) >= _BATCH_BYTES or time.monotonic() - begun_s > _BATCH_S:
            yield bytes(batch)
            batch.clear()
            begun_s = time.monotonic()
    if batch:
        yield bytes(batch)
