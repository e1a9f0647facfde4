"""From a directory of the host to records: what a sandbox's workspace starts with.

Owns: nothing. Invariant: every name is opened from its own directory's descriptor and without following a link, so a
tree that changes meanwhile never leads out of it; what is too large for the sandbox is refused before it starts.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from sandbox.errors import ConfigError
from sandbox.files.reading import BLOCK_BYTES, END_OF_FILE
from sandbox.files.records import MAX_PATH_BYTES, PERMISSIONS, Record, RecordKind, blocks, header
from sandbox.quantities import format_size
from sandbox.types import Limits, Skipped, SkippedKind

_FIELD = "spec.workspace"
_PAGE_BYTES = 4096
MAX_DEPTH = 200
"""Each level holds a descriptor while it is read."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Survey(NamedTuple):
    """What a tree needs of a sandbox."""

    root: str
    num_bytes: int
    num_entries: int
    skipped: tuple[Skipped, ...]
    """Links that lead out of the tree, devices, pipes and sockets: left out."""


class _Node(NamedTuple):
    path: str
    kind: RecordKind | SkippedKind
    info: os.stat_result
    directory: int
    name: str
    target: str = ""


def survey(root: str, limits: Limits) -> Survey:
    """Looks at a tree without opening any file (blocking).

    Raises:
        ConfigError: it is no directory, cannot be read, or does not fit into the sandbox; names `spec.workspace`.
    """
    num_bytes = num_entries = 0
    skipped = []
    for node in _walk(root):
        if isinstance(node.kind, str):
            skipped.append(Skipped(path=node.path, kind=node.kind))
            continue
        num_entries += node.kind is not RecordKind.SEAL
        if node.kind is RecordKind.FILE:
            num_bytes += -(-node.info.st_size // _PAGE_BYTES) * _PAGE_BYTES
            if node.info.st_size > limits.file_size_bytes:
                raise ConfigError(
                    _FIELD,
                    f"{root}/{node.path}",
                    f"is larger than limits.file_size_bytes = {format_size(limits.file_size_bytes)}; raise it",
                )
            with _named(root, node.path):
                _require_readable(node)
        if num_bytes > limits.disk_bytes or num_entries > limits.inodes:
            raise ConfigError(
                _FIELD,
                root,
                f"does not fit into limits.disk_bytes = {format_size(limits.disk_bytes)} and "
                f"limits.inodes = {limits.inodes}; raise them, or choose a smaller directory",
            )
    return Survey(root, num_bytes, num_entries, tuple(skipped))


def _require_readable(node: _Node) -> None:
    if not os.access(node.name, os.R_OK, dir_fd=node.directory, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def tree_records(root: str) -> Iterator[bytes]:
    """The tree's bytes for the pipe, in pieces of about a block (blocking).

    Raises:
        ConfigError: something cannot be read.
    """
    for node in _walk(root):
        if isinstance(node.kind, str):
            continue
        mode, mtime_s = node.info.st_mode & PERMISSIONS, max(0, int(node.info.st_mtime))
        if node.kind is RecordKind.FILE:
            yield from _file(root, node, mtime_s)
        elif node.kind is RecordKind.LINK:
            target = os.fsencode(node.target)
            yield header(Record(node.kind, node.path, 0, 0, len(target), mtime_s)) + target
        else:
            yield header(Record(node.kind, node.path, mode, 0, 0, mtime_s))
    yield header(Record(RecordKind.END, ""))


def _file(root: str, node: _Node, mtime_s: int) -> Iterator[bytes]:
    with _named(root, node.path):
        fd = os.open(node.name, _FILE, dir_fd=node.directory)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(_FIELD, f"{root}/{node.path}", "changed while it was read")
        yield header(Record(RecordKind.FILE, node.path, info.st_mode & PERMISSIONS, 0, info.st_size, mtime_s))
        left = info.st_size
        while left > 0 and (data := os.read(fd, min(left, BLOCK_BYTES))):
            left -= len(data)
            yield from blocks(data)
        yield END_OF_FILE
    finally:
        os.close(fd)


def _walk(root: str) -> Iterator[_Node]:
    """Every node once, parents first; a directory again (SEAL) when everything in it has been."""
    with _named(root, ""):
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # the caller's own name for it: may be a link
    try:
        yield from _walk_directory(root, "", top)
    finally:
        os.close(top)


def _walk_directory(root: str, above: str, fd: int) -> Iterator[_Node]:
    if above.count("/") >= MAX_DEPTH:
        raise ConfigError(_FIELD, root, f"is nested more than {MAX_DEPTH} directories deep")
    with _named(root, above):
        names = sorted(os.listdir(fd))
    for name in names:
        path = f"{above}/{name}" if above else name
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise ConfigError(_FIELD, root, f"has a path of more than {MAX_PATH_BYTES} bytes")
        with _named(root, path):
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(info.st_mode) else ""
        kind = _kind(info.st_mode, path, target)
        yield _Node(path, kind, info, fd, name, target)
        if kind is RecordKind.DIRECTORY:
            with _named(root, path):
                inner = os.open(name, _DIRECTORY, dir_fd=fd)
            try:
                yield from _walk_directory(root, path, inner)
            finally:
                os.close(inner)
            yield _Node(path, RecordKind.SEAL, info, fd, name)


def _kind(mode: int, path: str, target: str) -> RecordKind | SkippedKind:
    if stat.S_ISREG(mode):
        return RecordKind.FILE
    if stat.S_ISDIR(mode):
        return RecordKind.DIRECTORY
    if stat.S_ISLNK(mode):
        return RecordKind.LINK if _stays_inside(path, target) else "symlink"
    if stat.S_ISFIFO(mode):
        return "fifo"
    return "socket" if stat.S_ISSOCK(mode) else "device"


def _stays_inside(path: str, target: str) -> bool:
    """Is it relative, and does it never climb above the tree by its text?"""
    landing = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    return bool(target) and not target.startswith("/") and landing != ".." and not landing.startswith("../")


@contextmanager
def _named(root: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f"{root}/{path}" if path else root
        raise ConfigError(_FIELD, where, f"cannot be read as part of a workspace ({error.strerror})") from None
