"""What a workspace holds, as data: nodes by path, and how layers make one view.

Owns: nothing; pure. Invariant: a view is flat (every path that can be seen, the workspace itself as `b""`, nothing
else), and the parent of each of its paths is a directory of it. Paths are bytes, as the kernel has them.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from sandbox.layers.types import Change, ChangeKind, SpecialKind

StoredKind = Literal["file", "directory", "symlink"]


class Node(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file, directory or link."""

    kind: StoredKind
    mode: int = 0
    """Permission bits and the sticky bit."""
    mtime_ns: int = 0
    size: int = 0
    sha256: bytes = b""
    target: bytes = b""
    opaque: bool = False
    """Of a directory over bases: nothing of theirs is seen in it."""


View = Mapping[bytes, Node]


class Delta(msgspec.Struct, frozen=True):
    """What one layer says about its bases."""

    nodes: dict[bytes, Node]
    deleted: frozenset[bytes] = frozenset()
    special: dict[bytes, SpecialKind] = {}
    """FIFOs and the like: they hide what lies below their name, and are in no layer."""


def parent_of(path: bytes) -> bytes:
    """The directory that a path lies in."""
    return path[: max(0, path.rfind(b"/"))]


def overlay(base: View, delta: Delta) -> dict[bytes, Node]:
    """What is seen of a base through a delta."""
    if not base:
        return dict(delta.nodes)
    closed: dict[bytes, bool] = {b"": False}
    """For each directory of the base: is what lies in it hidden?"""

    def is_closed(path: bytes) -> bool:
        known = closed.get(path)
        if known is None:
            node = delta.nodes.get(path)
            if path in delta.deleted or path in delta.special or (node and (node.opaque or node.kind != "directory")):
                known = True
            else:
                known = is_closed(parent_of(path))
            closed[path] = known
        return known

    seen = {}
    for path, node in base.items():
        if path in delta.nodes or path in delta.deleted or path in delta.special:
            continue
        if path == b"" or not is_closed(parent_of(path)):
            seen[path] = node
    seen.update(delta.nodes)
    return seen


def hidden(base: View, ordered: Sequence[bytes], delta: Delta) -> set[bytes]:
    """Paths of the base that are not seen through the delta, and have nothing in their place but perhaps a FIFO.

    Takes time for what the delta says and hides alone.

    Args:
        ordered: the base's paths, sorted.
    """
    gone: set[bytes] = set()
    for path in (*delta.deleted, *delta.special):
        if path in base:
            gone.add(path)
            gone.update(_below(ordered, path))
    for path, node in delta.nodes.items():
        if (node.opaque or node.kind != "directory") and path in base:
            gone.update(_below(ordered, path))
    return gone - delta.nodes.keys()


def _below(ordered: Sequence[bytes], path: bytes) -> Iterator[bytes]:
    start = path + b"/"
    for at in range(bisect_left(ordered, start), len(ordered)):
        if not ordered[at].startswith(start):
            return
        yield ordered[at]


def differences(
    base: View, now: View, gone: Iterable[bytes], special: Mapping[bytes, SpecialKind]
) -> tuple[Change, ...]:
    """What is not as it was, by path.

    Args:
        now: at least what may differ.
        gone: paths of the base that are not there any more, or are special now.
    """
    changes = [
        Change(path=_text(path), kind="changed" if path in base else "created", node=kind)
        for path, kind in special.items()
    ]
    for path, node in now.items():
        old = base.get(path)
        if old is None and path != b"":
            changes.append(_change(path, "created", node))
        elif old is not None and _content(old) != _content(node):
            changes.append(_change(path, "changed", node))
    changes += [Change(path=_text(path), kind="deleted", node=base[path].kind) for path in gone if path not in special]
    return tuple(sorted(changes, key=lambda change: change.path))


def _content(node: Node) -> tuple[object, ...]:
    return node.kind, node.mode, node.size, node.sha256, node.target


def _text(path: bytes) -> str:
    return os.fsdecode(path) or "."


def _change(path: bytes, kind: ChangeKind, node: Node) -> Change:
    return Change(
        path=_text(path),
        kind=kind,
        node=node.kind,
        mode=node.mode,
        size_bytes=node.size if node.kind == "file" else 0,
        sha256=node.sha256.hex(),
        target=os.fsdecode(node.target),
    )


def reachable(base: View, paths: Iterable[bytes]) -> frozenset[bytes]:
    """Those of the paths that the base has: only they can be deleted from it."""
    return frozenset(path for path in paths if path in base)
