"""A directory as an image: each of its top-level entries is bound read-only.

Owns: nothing. Invariant: neither the host's own root nor a directory that holds the state directory is accepted,
since both would show an engine's secrets to the code it contains.
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.errors import ConfigError
from sandbox.images.host import STANDARD_PATH
from sandbox.images.types import Image, Mount

_MADE_BY_THE_JAIL = frozenset({"proc", "sys", "dev", "tmp", "workspace"})


def directory_image(name: str, state_dir: Path) -> Image:
    """Resolve an absolute directory path; ConfigError when it is missing, empty or not fit to be shown."""
    root = Path(name)
    try:
        resolved = root.resolve(strict=True)
        entries = sorted(os.scandir(resolved), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError("image", name, f"cannot be read as a directory ({error.strerror})") from None
    if resolved == Path("/"):
        raise ConfigError("image", name, "would show the whole host; use `host` for its /usr alone")
    if state_dir.resolve().is_relative_to(resolved):
        raise ConfigError("image", name, "holds the state directory; choose a directory that is a root file system")
    mounts = []
    for entry in entries:
        if entry.name in _MADE_BY_THE_JAIL:
            continue
        target = f"/{entry.name}"
        if entry.is_symlink():
            mounts.append(Mount(os.readlink(entry.path), target, "symlink"))
        elif entry.is_dir(follow_symlinks=False):
            mounts.append(Mount(entry.path, target))
        elif entry.is_file(follow_symlinks=False):
            mounts.append(Mount(entry.path, target, "file"))
    if not mounts:
        raise ConfigError("image", name, "is empty; an image needs a root file system (usr, bin, lib …)")
    return Image(name, tuple(mounts), STANDARD_PATH)
