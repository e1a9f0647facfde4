"""Layers as plain tars: out of the store, and (from whoever made the tar) into it.

Owns: nothing but the file that it writes. Invariant: a tar under its final name is complete; what comes in passes the
same checks as what comes from a sandbox, is read forward and with bounds, and makes a layer that lies over nothing.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO

from sandbox.errors import ConfigError, LayerError
from sandbox.files.caps import FullCaps
from sandbox.files.names import Names
from sandbox.files.reading import BLOCK_BYTES, END_OF_FILE
from sandbox.files.records import blocks
from sandbox.files.upload import HEADER_BYTES, Forward, next_member
from sandbox.layers.copying import content, owners
from sandbox.layers.folder import unwritable
from sandbox.layers.intake import Intake
from sandbox.layers.nodes import Delta, Node, parent_of
from sandbox.layers.records import MAX_TIME_S, PERMISSIONS, Record, RecordKind, encode
from sandbox.layers.store import LayerStore
from sandbox.layers.types import Layer
from sandbox.layers.writing import TreeWriter

_BILLION = 1_000_000_000


def write_tar(store: LayerStore, layer: Layer, target: Path) -> None:
    """Writes what is seen of a pinned layer, bases included, to a new tar in the place of `target` (blocking).

    Raises:
        LayerError: the store is damaged, or the file cannot be written.
    """
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(scratch, "xb") as file:
            try:
                _write_members(store, layer, file)
                file.flush()
                os.fsync(file.fileno())
                scratch.rename(target)
            except BaseException:
                scratch.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise unwritable(target, error) from None


def _write_members(store: LayerStore, layer: Layer, file: IO[bytes]) -> None:
    view, trees = store.view(layer), owners(store, layer)
    with tarfile.open(
        fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
    ) as tar:
        for path in sorted(view):
            node = view[path]
            info = _member(path, node)
            if node.kind == "file":
                with _Source(content(trees[path], path, node)) as source:
                    tar.addfile(info, source)
            else:
                tar.addfile(info)
            tar.members.clear()  # type: ignore[attr-defined]  # else it only grows


def _member(path: bytes, node: Node) -> tarfile.TarInfo:
    info = tarfile.TarInfo(os.fsdecode(path) or ".")
    info.mode = node.mode
    seconds, nanoseconds = divmod(node.mtime_ns, _BILLION)
    info.mtime = seconds
    info.pax_headers = {"mtime": f"{seconds}.{nanoseconds:09d}"}
    if node.kind == "directory":
        info.type = tarfile.DIRTYPE
    elif node.kind == "symlink":
        info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(node.target)
    else:
        info.size = node.size
    return info


class _Source:
    """Pieces of a file as `tarfile` reads them: so many bytes at a time."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.close()  # type: ignore[attr-defined]  # a generator: it closes the file

    def read(self, size: int = -1, /) -> bytes:
        while len(self._rest) < size and (piece := next(self._pieces, b"")):
            self._rest += piece
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def read_tar(source: Path, caps: FullCaps, writer: TreeWriter) -> Delta:
    """Makes a tree, and what says about it, of a plain tar of files, directories and symbolic links (blocking).

    Raises:
        LayerError: it is none, or has something that no layer may have; names it.
    """
    try:
        with open(source, "rb") as file:
            intake = Intake(caps, writer, str(source))
            for piece in _records(Forward(file), caps):
                intake.feed(piece)
            return intake.result()
    except OSError as error:
        raise LayerError(f"{source} cannot be read ({error.strerror})") from None
    except ConfigError as error:
        raise LayerError(f"{source}: {error.value} {error.remedy}") from None
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
        raise LayerError(f"{source} cannot be read as a plain (uncompressed) tar: {error}") from None


def _records(forward: Forward, caps: FullCaps) -> Iterator[bytes]:
    """The tar as the stream of a workspace; directories that are named by what lies in them alone are made up."""
    names = Names(caps.max_entries)
    known: set[bytes] = set()
    forward.limit(HEADER_BYTES)
    with tarfile.open(fileobj=forward, mode="r:", errors="surrogateescape", encoding="utf-8") as tar:
        while (member := next_member(tar, forward)) is not None:
            path = _check(member, names)
            if path and b"" not in known:
                yield from _made_up(b"", known)
            if path:
                yield from _made_up(parent_of(path), known)
            yield from _entry(tar, member, path)
            if member.isdir():
                known.add(path)
    if forward.last != bytes(tarfile.BLOCKSIZE):
        raise LayerError("the tar is cut off or damaged: it does not end as a tar ends")
    yield from _made_up(b"", known)
    yield encode(Record(RecordKind.END, b""))


def _made_up(path: bytes, known: set[bytes]) -> Iterator[bytes]:
    missing = []
    while path not in known:
        missing.append(path)
        known.add(path)
        path = parent_of(path)
    for name in reversed(missing):
        yield encode(Record(RecordKind.DIRECTORY, name, 0o755))


def _check(member: tarfile.TarInfo, names: Names) -> bytes:
    """The member's clean path; empty for the workspace itself."""
    name = names.clean(member.name)
    if name is None:
        raise LayerError(f"{member.name!r} in the tar must be a relative path without `..` and NUL")
    if not (member.isreg() or member.isdir() or member.issym()) or member.issparse():
        raise LayerError(f"{name!r} in the tar is neither a plain file, a directory nor a symbolic link")
    if member.size < 0 or (not name and not member.isdir()):
        raise LayerError(f"{name!r} in the tar is no member of a plain tar")
    return os.fsencode(name)


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo, path: bytes) -> Iterator[bytes]:
    mode, mtime_ns = member.mode & PERMISSIONS, _time_of(member)
    if member.isdir():
        yield encode(Record(RecordKind.DIRECTORY, path, mode, mtime_ns=mtime_ns))
    elif member.issym():
        yield encode(Record(RecordKind.LINK, path, mtime_ns=mtime_ns, target=os.fsencode(member.linkname)))
    else:
        yield encode(Record(RecordKind.FILE, path, mode, mtime_ns=mtime_ns, size=member.size))
        file = tar.extractfile(member)
        assert file is not None, "a regular file has content"
        left = member.size
        while left > 0:
            data = file.read(min(left, BLOCK_BYTES))
            if not data:
                raise LayerError(f"{member.name!r} is cut off: the tar ends inside it")
            left -= len(data)
            yield from blocks(data)
        yield END_OF_FILE


def _time_of(member: tarfile.TarInfo) -> int:
    """Exact, where the tar has it so: a float holds no nanoseconds."""
    try:
        time = Decimal(member.pax_headers.get("mtime", member.mtime))
        nanoseconds = int(time * _BILLION) if time.is_finite() else 0
    except (InvalidOperation, ValueError, OverflowError):
        nanoseconds = 0
    return min(max(0, nanoseconds), MAX_TIME_S * _BILLION)
