"""From the stream of a workspace to a delta, and (to seal it) to a tree in the store.

Owns: the delta in the making. Invariant: it never holds more entries or content than the caps; a file's hash and size
are of the bytes that came, which are the ones that were written.
"""

from __future__ import annotations

import errno
import hashlib
import os

from sandbox.errors import LayerError, ProtocolError
from sandbox.exhaustion import exhausted_writing
from sandbox.files.caps import FullCaps
from sandbox.layers.nodes import Delta, Node
from sandbox.layers.records import SPECIAL_KINDS, Record, RecordKind, RecordReader
from sandbox.layers.types import SpecialKind
from sandbox.layers.writing import TreeWriter


class Intake:
    """Takes one workspace.

    Args:
        caps: of the content of all files, and of the number of entries.
        writer: makes a tree of it; None where only the delta is wanted.
        what: is read, for messages.
    """

    def __init__(self, caps: FullCaps, writer: TreeWriter | None, what: str = "the workspace") -> None:
        self._what = what
        self._bytes_left = caps.max_bytes
        self._entries_left = caps.max_entries + 1  # the workspace itself is one
        self._writer = writer
        self._reader = RecordReader()
        self._nodes: dict[bytes, Node] = {}
        self._deleted: set[bytes] = set()
        self._special: dict[bytes, SpecialKind] = {}
        self._open: tuple[Record, int] | None = None
        self._hash = hashlib.sha256()
        self.finished = False

    def feed(self, data: bytes) -> None:
        """Takes what came (blocking: writes files).

        Raises:
            LayerError: the workspace is too large, cannot be read, or the store cannot be written.
            ExhaustedError: the disk is full.
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
                    self._end_file()
        except ProtocolError as error:
            raise LayerError(f"{self._what} cannot be read: {error}") from None
        except OSError as error:
            full = exhausted_writing("the store of layers", error)
            raise full or LayerError(f"the store of layers cannot be written ({error.strerror})") from None

    def result(self) -> Delta:
        """All of it.

        Raises:
            LayerError: the stream ended too early.
        """
        if not self.finished or b"" not in self._nodes:
            raise LayerError(f"{self._what} cannot be read: it ends too early")
        return Delta(self._nodes, frozenset(self._deleted), self._special)

    def _take_record(self, record: Record) -> None:
        if record.kind is RecordKind.END:
            self.finished = True
            return
        if record.kind is RecordKind.FAILED:
            raise LayerError(f"{_shown(record.path)}: {_words(record.error)}")
        self._entries_left -= 1
        if self._entries_left < 0:
            raise LayerError(f"{_shown(record.path)}: {_words(errno.E2BIG)}")
        match record.kind:
            case RecordKind.FILE:
                self._begin_file(record)
            case RecordKind.DIRECTORY:
                node = Node("directory", record.mode, record.mtime_ns, opaque=record.opaque)
                self._nodes[record.path] = node
                if self._writer is not None:
                    self._writer.directory(record.path)
            case RecordKind.LINK:
                self._nodes[record.path] = Node("symlink", 0, record.mtime_ns, target=record.target)
                if self._writer is not None:
                    self._writer.link(record.path, record.target, record.mtime_ns)
            case RecordKind.DELETED:
                self._deleted.add(record.path)
            case RecordKind.SPECIAL:
                self._special[record.path] = SPECIAL_KINDS.get(record.mode, "other")

    def _begin_file(self, record: Record) -> None:
        self._bytes_left -= record.size
        if self._bytes_left < 0:
            raise LayerError(f"{_shown(record.path)}: {_words(errno.EFBIG)}")
        self._open = (record, 0)
        self._hash = hashlib.sha256()
        if self._writer is not None:
            self._writer.begin_file(record.path)

    def _take_content(self, data: bytes) -> None:
        assert self._open is not None
        self._open = (self._open[0], self._open[1] + len(data))
        self._hash.update(data)
        if self._writer is not None:
            self._writer.write(data)

    def _end_file(self) -> None:
        assert self._open is not None
        record, size = self._open
        self._open = None
        self._nodes[record.path] = Node("file", record.mode, record.mtime_ns, size, self._hash.digest())
        if self._writer is not None:
            self._writer.end_file(record.mode, record.mtime_ns)


def _shown(path: bytes) -> str:
    return f"/workspace/{os.fsdecode(path)}" if path else "/workspace"


def _words(error: int) -> str:
    if error == errno.EFBIG:
        return "the files from there on do not fit into max_bytes any more"
    if error == errno.E2BIG:
        return "there are more entries than max_entries"
    if error == errno.ENAMETOOLONG:
        return "what lies there has a path too long for a layer"
    if error == errno.EAGAIN:
        return "it was replaced while it was read"
    return os.strerror(error)
