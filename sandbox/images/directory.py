"""A directory as an image: each of its top-level entries is bound read-only.

Owns: nothing. Invariant: neither the host's own root or kernel file systems nor a directory that holds the state
directory is accepted, since they would show an engine's secrets to the code it contains. Whatever the directory has
where the jail makes something of its own (`/proc`, `/tmp`, `/workspace` …) is left out, be it a link or a file.
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.errors import ConfigError
from sandbox.images.host import STANDARD_PATH
from sandbox.images.types import Image, Mount

_MADE_BY_THE_JAIL = frozenset({"proc", "sys", "dev", "tmp", "workspace", ".rollout"})
_KERNELS_OWN = ("/proc", "/sys", "/dev")
_NEEDED = frozenset({"usr", "bin", "sbin", "lib", "lib64", "etc"})
"""What commands cannot do without; other directories (`root`, `home`) may well be closed."""
_MAX_ENTRIES = 256


def directory_image(name: str, state_dir: Path, foreign: bool) -> Image:
    """Resolve an absolute directory path.

    Args:
        foreign: sandboxes run as uids other than this process's.

    Raises:
        ConfigError: it is missing, empty, not fit to be shown, or closed to the uids of sandboxes.
    """
    root = Path(name)
    try:
        resolved = root.resolve(strict=True)
        entries = sorted(os.scandir(resolved), key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError("image", name, f"cannot be read as a directory ({error.strerror})") from None
    if resolved == Path("/"):
        raise ConfigError("image", name, "would show the whole host; use `host` for its /usr alone")
    if any(resolved.is_relative_to(place) for place in _KERNELS_OWN):
        raise ConfigError("image", name, "is the kernel's, not a root file system; choose a directory on a disk")
    if len(entries) > _MAX_ENTRIES:
        raise ConfigError("image", name, f"has {len(entries)} entries; a root file system has at most {_MAX_ENTRIES}")
    if state_dir.resolve().is_relative_to(resolved):
        raise ConfigError("image", name, "holds the state directory; choose a directory that is a root file system")
    needed = [Path(entry.path) for entry in entries if entry.name in _NEEDED and entry.is_dir(follow_symlinks=False)]
    _require_open(name, resolved, needed, foreign)
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


def _require_open(name: str, root: Path, needed: list[Path], foreign: bool) -> None:
    """Checks that sandboxes reach the directory, and read what they need in it."""
    remedy = f"chmod -R o+rX {root}, or move it" if foreign else "make it readable for this user"
    for path in (*reversed(root.parents), root, *needed):
        mode = path.stat().st_mode & 0o005 if foreign else 4 * os.access(path, os.R_OK) | os.access(path, os.X_OK)
        if mode != 0o005 and not (path not in needed and mode & 0o001):
            whom = "other users, and a sandbox runs as one" if foreign else "this user"
            raise ConfigError("image", name, f"{path} is closed to {whom}; {remedy}")
