"""What callers see of layers.

Invariant: plain immutable data. A `Layer` is a name with facts about what it names; the store decides how long that
lives.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from sandbox.types import Skipped

MAX_DEPTH = 24
"""Layers that lie over each other under one workspace: the kernel looks into each of them. More are made one."""

SpecialKind = Literal["fifo", "socket", "device", "other"]
NodeKind = Literal["file", "directory", "symlink", "fifo", "socket", "device", "other"]
ChangeKind = Literal["created", "changed", "deleted"]


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed workspace: what was changed over its bases, read-only for good."""

    ident: str
    bases: tuple[str, ...] = ()
    """Idents of the layers under it, newest first."""
    mode: int = 0o755
    """Of the workspace itself."""
    num_entries: int = 0
    """Of the whole workspace, bases included."""
    num_bytes: int = 0
    """Content of the files that this layer itself holds."""
    skipped: tuple[Skipped, ...] = ()
    """FIFOs, sockets and devices, which a layer does not hold."""

    @property
    def chain(self) -> tuple[str, ...]:
        """Idents of all layers that make up the workspace, newest first."""
        return (self.ident, *self.bases)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One path that is not as it was in the base. Times and extended attributes are not compared."""

    path: str
    """Relative to the workspace; `.` for itself. Bytes that are no UTF-8 come as surrogate escapes."""
    kind: ChangeKind
    node: NodeKind
    """What it is now; of what was deleted: what it was."""
    mode: int = 0
    """Permission bits and the sticky bit; 0 for links, and for what was deleted."""
    size_bytes: int = 0
    """Of a file's content."""
    sha256: str = ""
    """Of a file's content, hexadecimal."""
    target: str = ""
    """Of a symbolic link, as it stands there."""


class Attachment(NamedTuple):
    """What the warden is told of a base."""

    trees: tuple[str, ...]
    """Directories of the host, newest first."""
    mode: int
    """Of the workspace itself."""
