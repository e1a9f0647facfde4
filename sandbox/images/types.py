"""What an image resolves to: mounts and a default environment, plain data.

Owns: the contract between whoever prepares root file systems and the jails that mount them.
Invariant: every `Mount.source` of kind `ro_bind` or `file` is a path that any host uid can reach and read,
and nothing here is ever writable from inside a sandbox.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MountKind = Literal["ro_bind", "symlink", "file"]


class Mount(msgspec.Struct, frozen=True):
    """One read-only piece of a root file system.

    `ro_bind` binds the host directory `source` (recursively) at `target`; `file` does so for a single file;
    `symlink` makes `target` a symbolic link whose text is `source`. `target` is absolute, inside the sandbox.
    """

    source: str
    target: str
    kind: MountKind = "ro_bind"


class Image(msgspec.Struct, frozen=True):
    """A resolved root file system; equal images give interchangeable sandboxes."""

    name: str
    mounts: tuple[Mount, ...]
    path: str
    """Value of PATH inside."""
    env: dict[str, str] = {}
    """Further default environment of every command in this image."""
