"""Writes a layer's tree into the store: as it is to be mounted, where this user can mount it (root); else the bytes
alone, open to this user, since all else is in the manifest.

Owns: one new directory of the store, of this user's alone, while it is filled. Invariant: every name is made in a
directory that is opened component by component from the root of the tree, without following a link; nothing is ever
written through what exists; set-user-id bits and foreign owners do not occur.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sandbox.files.reading import BLOCK_BYTES
from sandbox.layers.nodes import Delta, Node, parent_of

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ZEROS = bytes(BLOCK_BYTES)
OPAQUE_ATTRIBUTE = "user.overlay.opaque"


class TreeWriter:
    """Args: an existing, empty directory. Everything blocks; `close` ends it, whatever happened."""

    def __init__(self, root: Path) -> None:
        self._root = os.open(root, _DIRECTORY)
        self._above = b""
        self._parent = os.dup(self._root)
        self._file = -1
        self._size = 0
        self._mountable = os.geteuid() == 0

    def close(self) -> None:
        """Lets go of all descriptors; idempotent."""
        for fd in (self._root, self._parent, self._file):
            if fd >= 0:
                os.close(fd)
        self._root = self._parent = self._file = -1

    def _enter(self, path: bytes) -> int:
        """A descriptor of that directory, kept for the next name in it."""
        if path != self._above:
            fd = os.dup(self._root)
            for name in path.split(b"/") if path else ():
                try:
                    inner = os.open(name, _DIRECTORY, dir_fd=fd)
                finally:
                    os.close(fd)
                fd = inner
            os.close(self._parent)
            self._parent, self._above = fd, path
        return self._parent

    def _place(self, path: bytes) -> tuple[bytes, int]:
        above = parent_of(path)
        return path[len(above) + 1 if above else 0 :], self._enter(above)

    def directory(self, path: bytes) -> None:
        """Makes a directory, open to its owner until `finish`."""
        if path:
            name, parent = self._place(path)
            os.mkdir(name, 0o700, dir_fd=parent)

    def link(self, path: bytes, target: bytes, mtime_ns: int) -> None:
        """Makes a symbolic link."""
        name, parent = self._place(path)
        os.symlink(target, name, dir_fd=parent)
        os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)

    def same_file(self, path: bytes, tree: int) -> None:
        """Makes a further name of a file that lies at that path in another tree of the store, which is open."""
        name, parent = self._place(path)
        os.link(path, name, src_dir_fd=tree, dst_dir_fd=parent, follow_symlinks=False)

    def whiteout(self, path: bytes) -> None:
        """Marks a name as deleted from what lies below this layer (no privilege is needed for this device)."""
        name, parent = self._place(path)
        os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)

    def begin_file(self, path: bytes) -> None:
        """Makes a regular file; `write` and `end_file` follow."""
        name, parent = self._place(path)
        self._file = os.open(name, _NEW_FILE, 0o600, dir_fd=parent)
        self._size = 0

    def write(self, data: bytes) -> None:
        """Appends to the file; zeros become a hole."""
        self._size += len(data)
        if len(data) == BLOCK_BYTES and data == _ZEROS:
            os.lseek(self._file, len(data), os.SEEK_CUR)
            return
        left = memoryview(data)
        while left:
            left = left[os.write(self._file, left) :]

    def end_file(self, mode: int, mtime_ns: int) -> None:
        """Gives the file its length, mode and time."""
        os.ftruncate(self._file, self._size)
        if self._mountable:
            os.fchmod(self._file, mode)
        os.utime(self._file, ns=(mtime_ns, mtime_ns))
        os.close(self._file)
        self._file = -1

    def finish(self, delta: Delta) -> None:
        """Marks what is deleted, then gives every directory its mark, mode and time, the deepest first."""
        if not self._mountable:
            return
        for path in sorted(delta.deleted):
            self.whiteout(path)
        for path in sorted((path for path, node in delta.nodes.items() if node.kind == "directory"), reverse=True):
            _dress(self._enter(path), delta.nodes[path])


def _dress(fd: int, node: Node) -> None:
    if node.opaque:
        os.setxattr(fd, OPAQUE_ATTRIBUTE, b"y")
    os.fchmod(fd, node.mode)
    os.utime(fd, ns=(node.mtime_ns, node.mtime_ns))
