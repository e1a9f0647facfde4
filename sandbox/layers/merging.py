"""Many layers made one, when more of them lie over each other than is good.

Owns: nothing. Invariant: the result shows what they show; a file that an older layer holds is not copied, it gets a
further name.
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.layers.copying import owners
from sandbox.layers.folder import unwritable
from sandbox.layers.nodes import Delta, Node, overlay
from sandbox.layers.store import LayerStore
from sandbox.layers.types import Layer
from sandbox.layers.writing import TreeWriter

_TREE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def merge(store: LayerStore, base: Layer, delta: Delta, writer: TreeWriter) -> Delta:
    """Completes the tree of a delta with all that is seen of its (pinned) base, so that it lies over nothing
    (blocking).

    Raises:
        LayerError: the store is damaged, or cannot be written.
    """
    seen = overlay(store.view(base), delta)
    trees = owners(store, base)
    opened: dict[Path, int] = {}
    try:
        for path in sorted(seen):
            if path not in delta.nodes:
                _add(path, seen[path], trees, opened, writer)
    except OSError as error:
        raise unwritable(store.root, error) from None
    finally:
        for fd in opened.values():
            os.close(fd)
    return Delta({path: _plain(node) for path, node in seen.items()})


def _add(path: bytes, node: Node, trees: dict[bytes, Path], opened: dict[Path, int], writer: TreeWriter) -> None:
    if node.kind == "directory":
        writer.directory(path)
    elif node.kind == "symlink":
        writer.link(path, node.target, node.mtime_ns)
    else:
        tree = trees[path]
        if tree not in opened:
            opened[tree] = os.open(tree, _TREE)
        writer.same_file(path, opened[tree])


def _plain(node: Node) -> Node:
    """Nothing is left that an opaque directory could hide."""
    if not node.opaque:
        return node
    return Node(node.kind, node.mode, node.mtime_ns)
