"""A base for a workspace that cannot lie over it: its files are copied in, as records (sandbox/files/records.py).

Owns: nothing. Invariant: what is sent is what the layer's manifest says, and nothing that does not fit is begun.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sandbox.errors import ConfigError, LayerError
from sandbox.files.reading import BLOCK_BYTES, END_OF_FILE
from sandbox.files.records import Record, RecordKind, blocks, header
from sandbox.layers.nodes import Node, View
from sandbox.layers.store import LayerStore
from sandbox.layers.types import Layer
from sandbox.quantities import format_size
from sandbox.types import Limits

_PAGE_BYTES = 4096
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def require_room(view: View, limits: Limits) -> int:
    """Checks that a copy fits into a sandbox; its size in bytes.

    Raises:
        ConfigError: it does not.
    """
    num_bytes = sum(-(-node.size // _PAGE_BYTES) * _PAGE_BYTES for node in view.values())
    largest = max((node.size for node in view.values()), default=0)
    if num_bytes > limits.disk_bytes or len(view) > limits.inodes or largest > limits.file_size_bytes:
        raise ConfigError(
            "base",
            f"{len(view)} entries, {format_size(num_bytes)}",
            f"must be copied on this host, and does not fit into limits.disk_bytes = {format_size(limits.disk_bytes)}, "
            f"limits.inodes = {limits.inodes} and limits.file_size_bytes = {format_size(limits.file_size_bytes)}; "
            "raise them, or run as root, where a base takes nothing of them",
        )
    return num_bytes


def owners(store: LayerStore, layer: Layer) -> dict[bytes, Path]:
    """For each file of a pinned layer's view, in which tree its bytes lie."""
    view = store.view(layer)
    found: dict[bytes, Path] = {}
    for ident in reversed(layer.chain):
        tree = store.tree(ident)
        for path, node in store.manifest(ident).nodes:
            if view.get(path) is node:
                found[path] = tree
    return found


def copy_records(store: LayerStore, layer: Layer) -> Iterator[bytes]:
    """The bytes for the pipe of a helper inside, in pieces of about a block (blocking).

    Raises:
        LayerError: the store has been damaged.
    """
    view = store.view(layer)
    trees = owners(store, layer)
    for path in sorted(view):
        if path:
            yield from _entry(path, view[path], trees)
    for path in sorted((path for path, node in view.items() if node.kind == "directory"), reverse=True):
        yield header(_record(RecordKind.SEAL, path, view[path]))
    yield header(Record(RecordKind.END, ""))


def _record(kind: RecordKind, path: bytes, node: Node, size: int = 0) -> Record:
    return Record(kind, os.fsdecode(path), node.mode, 0, size, node.mtime_ns // 1_000_000_000)


def _entry(path: bytes, node: Node, trees: dict[bytes, Path]) -> Iterator[bytes]:
    if node.kind == "directory":
        yield header(_record(RecordKind.DIRECTORY, path, node))
    elif node.kind == "symlink":
        yield header(_record(RecordKind.LINK, path, node, len(node.target))) + node.target
    else:
        yield header(_record(RecordKind.FILE, path, node, node.size))
        for data in content(trees[path], path, node):
            yield from blocks(data)
        yield END_OF_FILE


def content(tree: Path, path: bytes, node: Node) -> Iterator[bytes]:
    """A file's bytes, which lie in that tree.

    Raises:
        LayerError: they are not there.
    """
    try:
        root = os.open(tree, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = os.open(path, _FILE, dir_fd=root)
        finally:
            os.close(root)
    except OSError as error:
        raise LayerError(f"layer {tree.parent.name} is damaged: {os.fsdecode(path)} ({error.strerror})") from None
    try:
        left = node.size
        while left > 0:
            data = os.read(fd, min(left, BLOCK_BYTES))
            if not data:
                raise LayerError(f"layer {tree.parent.name} is damaged: {os.fsdecode(path)} is too short")
            left -= len(data)
            yield data
    finally:
        os.close(fd)
