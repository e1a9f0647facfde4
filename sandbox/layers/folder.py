"""What lies in the folder of layers, whoever made it; shared by engines, `census` and `gc`.

Owns: the layout (`ID/` with `tree`, `manifest`, `lock`, `facts`, and `kept` where it outlives its engine). Invariant:
only what no living engine holds, and nothing lies over, is ever removed, and what has a layer's name is whole: removing
renames first. A layer is held by a shared lock on its `lock`, which the kernel drops with its last holder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import msgspec

from sandbox.errors import ConfigError, LayerError, SandboxError
from sandbox.exhaustion import exhausted_writing
from sandbox.layers.nodes import Delta
from sandbox.layers.types import Layer

FOLDER = "layers"
NEW, DEAD = ".new-", ".dead-"
IDENT_BYTES = 10
_BLOCK_BYTES = 4096


class Facts(msgspec.Struct, frozen=True):
    """About one layer, so that its manifest need not be read."""

    layer: Layer
    disk_bytes: int
    """What it takes of the disk, its own entries alone."""


def unwritable(path: Path, error: OSError) -> SandboxError:
    """The fault for something that could not be written: the host is full, or it is the place's own."""
    return exhausted_writing(str(path), error) or LayerError(f"{path} cannot be written ({error.strerror})")


def write_facts(path: Path, layer: Layer, delta: Delta) -> None:
    """Writes them beside a manifest."""
    blocks = sum(1 + -(-node.size // _BLOCK_BYTES) for node in delta.nodes.values())
    path.write_bytes(msgspec.json.encode(Facts(layer, blocks * _BLOCK_BYTES)))


def read_facts(path: Path) -> Facts | None:
    """Those of a layer; None where it is gone, or a crash of the host left them unreadable."""
    try:
        return msgspec.json.decode((path / "facts").read_bytes(), type=Facts)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def require_own(root: Path) -> None:
    """Checks that nobody else can reach, or change, what sandboxes are based on.

    Raises:
        ConfigError: they can.
    """
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            "state_dir", str(root), "must be a directory of this user's own, mode 0700; or choose another"
        )


def is_ident(name: str) -> bool:
    return len(name) == 2 * IDENT_BYTES and set(name) <= set("0123456789abcdef")


@contextmanager
def registry_lock(root: Path) -> Iterator[None]:
    """Held for moments, while a layer's lock is taken or the layer is renamed to be removed."""
    fd = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def idents_in(root: Path) -> list[str]:
    """Every complete layer."""
    try:
        return sorted(name for name in os.listdir(root) if is_ident(name))
    except FileNotFoundError:
        return []


def is_kept(path: Path) -> bool:
    """Is that layer to outlive its engine?"""
    return (path / "kept").exists()


def bases_in(root: Path) -> set[str]:
    """Every layer that another one lies over."""
    return {base for ident in idents_in(root) if (facts := read_facts(root / ident)) for base in facts.layer.bases}


def is_free(path: Path) -> bool:
    """Does no living engine hold that layer (or half-made layer)? Ask under the registry's lock."""
    try:
        fd = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    finally:
        os.close(fd)


def remove_layer(root: Path, ident: str) -> bool:
    """Removes a layer that nobody holds and that nothing lies over; False where it stays, or is not there."""
    dead = root / f"{DEAD}{ident}"
    with registry_lock(root):
        if not (root / ident).is_dir() or ident in bases_in(root) or not is_free(root / ident):
            return False
        (root / ident).rename(dead)
    remove_tree(dead)
    return True


def leftovers_in(root: Path) -> list[Path]:
    """Layers that were half made, or half removed, by engines that are dead."""
    try:
        names = [name for name in os.listdir(root) if name.startswith((NEW, DEAD))]
    except FileNotFoundError:
        return []
    with registry_lock(root):
        return sorted(root / name for name in names if is_free(root / name))


def unused_in(root: Path) -> list[str]:
    """Layers that nobody holds or keeps, themselves or what lies over them; the newest first."""
    idents = idents_in(root)
    with registry_lock(root) if idents else nullcontext():
        used = [ident for ident in idents if is_kept(root / ident) or not is_free(root / ident)]
    facts = [read_facts(root / ident) for ident in used]
    wanted = {*used, *(base for known in facts if known for base in known.layer.bases)}
    return sorted(set(idents) - wanted, key=lambda ident: age_of(root / ident), reverse=True)


def age_of(path: Path) -> int:
    """When a layer was made, as its file system's clock had it; 0 where it is gone."""
    try:
        return (path / "manifest").stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def sweep(root: Path) -> list[Path]:
    """Removes leftovers, and layers that nobody holds or keeps; what was removed."""
    leftovers = leftovers_in(root)
    for path in leftovers:
        remove_tree(path)
    return leftovers + [root / ident for ident in unused_in(root) if remove_layer(root, ident)]


def remove_tree(path: Path) -> None:
    """Removes a directory of ours with everything in it; what is gone already is gone.

    Raises:
        OSError: something stays.
    """
    shutil.rmtree(path, onerror=_unless_gone)


def _unless_gone(function: object, name: str, failure: tuple[object, BaseException, object]) -> None:
    if not isinstance(failure[1], FileNotFoundError):
        raise failure[1]
