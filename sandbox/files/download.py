"""From records to a tar: what the inside sends, checked again before the host sees any of it.

Owns: the tar in the making. Invariant: at any time it is a whole number of complete members (and the one that is being
filled), of regular files and directories alone, below its cap with its end included; the sender is not believed.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile

from sandbox.errors import ProtocolError, TransferError
from sandbox.files.names import Names
from sandbox.files.records import Record, RecordKind, RecordReader
from sandbox.types import Skipped, SkippedKind, TarDownload

_END = bytes(2 * tarfile.BLOCKSIZE)
_MAX_TIME_S = 1 << 33
_KINDS: dict[int, SkippedKind] = {
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class TarBuilder:
    """Makes a tar of the records of one download.

    Args:
        where: the directory inside; failures name it.
        max_bytes: of the tar, with what is skipped counted as empty members of such names.
        max_entries: of everything that is found, skipped things included.
    """

    def __init__(self, where: str, max_bytes: int, max_entries: int) -> None:
        self._where = where
        self._max_bytes = max_bytes
        self._entries_left = max_entries
        self._names = Names(max_entries)
        self._reader = RecordReader()
        self._data = bytearray()
        self._skipped: list[Skipped] = []
        self._skipped_bytes = 0
        self._open: tuple[tarfile.TarInfo, int] | None = None  # the file that is being filled, where its header lies
        self._counts = {RecordKind.FILE: 0, RecordKind.DIRECTORY: 0}
        self.finished = False

    def feed(self, data: bytes) -> None:
        """Takes what came.

        Raises:
            TransferError: the inside gave up (too large, too many …), or sends what it should not.
        """
        try:
            for event in self._reader.take(data):
                if self.finished:
                    raise ProtocolError("something after the end")
                if isinstance(event, Record):
                    self._take_record(event)
                elif event is not None:
                    self._take_content(event)
                else:
                    self._close_file()
        except ProtocolError as error:
            raise TransferError(self._where, f"the sandbox sent no well-formed tree ({error})", errno.EPROTO) from None

    def result(self) -> TarDownload:
        """The whole of it; once, when it is finished."""
        assert self.finished
        self._data += _END
        return TarDownload(
            data=bytes(self._data),
            skipped=tuple(self._skipped),
            num_files=self._counts[RecordKind.FILE],
            num_directories=self._counts[RecordKind.DIRECTORY],
        )

    def _take_record(self, record: Record) -> None:
        if record.kind is RecordKind.END:
            self.finished = True
        elif record.kind is RecordKind.FAILED:
            raise TransferError(self._path(record), _words(record.error), record.error)
        elif record.kind is RecordKind.SKIPPED:
            self._count(record)
            self._charge_skipped(record)
            kind = _KINDS.get(record.mode << 12, "other") if record.error == 0 else _reason(record.error)
            self._skipped.append(Skipped(path=record.path, kind=kind))
        elif record.kind in (RecordKind.FILE, RecordKind.DIRECTORY):
            self._count(record)
            self._open_member(record)
        else:
            raise ProtocolError(f"a record of kind {record.kind.name}")

    def _path(self, record: Record) -> str:
        return f"{self._where}/{record.path}" if record.path else self._where

    def _count(self, record: Record) -> None:
        self._entries_left -= 1
        if self._entries_left < 0:
            raise TransferError(self._path(record), _words(errno.E2BIG), errno.E2BIG)

    def _check_name(self, record: Record) -> None:
        if not record.path or self._names.clean(record.path) != record.path:
            raise ProtocolError("a name that does not stay inside")

    def _charge_skipped(self, record: Record) -> None:
        """Its name is held, and given out, as well as a member's."""
        self._check_name(record)
        self._skipped_bytes += tarfile.BLOCKSIZE + _padded(len(record.path.encode("utf-8", "surrogateescape")))
        self._check_fits(record, len(self._data))

    def _check_fits(self, record: Record, num_bytes: int) -> None:
        if num_bytes + self._skipped_bytes + len(_END) > self._max_bytes:
            raise TransferError(self._path(record), _words(errno.EFBIG), errno.EFBIG)

    def _open_member(self, record: Record) -> None:
        self._check_name(record)
        is_file = record.kind is RecordKind.FILE
        wrong = self._names.add(record.path, "file" if is_file else "directory")
        if wrong is not None:
            raise ProtocolError(wrong)
        info = tarfile.TarInfo(record.path)
        info.mode = record.mode
        info.mtime = min(max(0, record.mtime_s), _MAX_TIME_S)
        info.size = record.size
        info.type = tarfile.REGTYPE if is_file else tarfile.DIRTYPE
        at = len(self._data)
        head = _head(info)
        self._check_fits(record, at + len(head) + _padded(record.size))
        self._data += head
        self._counts[record.kind] += 1
        if is_file:
            info.size = 0
            self._open = (info, at)

    def _take_content(self, data: bytes) -> None:
        assert self._open is not None
        self._data += data
        self._open[0].size += len(data)

    def _close_file(self) -> None:
        """Pads the file, and says in its header how long it came to be."""
        assert self._open is not None
        info, at = self._open
        head = _head(info)
        self._data[at : at + len(head)] = head
        self._data += bytes(-len(self._data) % tarfile.BLOCKSIZE)
        self._open = None


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _head(info: tarfile.TarInfo) -> bytes:
    """Always as long for one name: sizes have a field of fixed width in this format."""
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _reason(error: int) -> SkippedKind:
    if error in (errno.EACCES, errno.EPERM):
        return "unreadable"
    return "too long" if error == errno.ENAMETOOLONG else "changed"


def _words(error: int) -> str:
    if error == errno.EFBIG:
        return "does not fit into max_bytes any more"
    if error == errno.E2BIG:
        return "there are more entries than max_entries"
    return os.strerror(error)
