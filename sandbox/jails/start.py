"""What the warden does to start one jail or renew its mounts, beside what is that sandbox's alone (its uid and cgroup).

Owns: the order of those steps. Invariant: equal arguments give equal items, so a host makes them once for all
sandboxes of one image, jail and size.
"""

from __future__ import annotations

from pathlib import Path

from sandbox.images.types import Image
from sandbox.jails.plan import AGENT_FD, AGENT_PATH, DEVICE_MINORS, FILTER_FD, STAGING_PATH, JailPlan
from sandbox.jails.tools import Jail
from sandbox.jails.views import view_items
from sandbox.layers.types import Attachment
from sandbox.protocol.wire import Item, Tag, number, numbered, text

_OWN_INODES = 5
"""Of a sandbox's tmpfs: its root, the writable mounts, and what the warden needs to make them."""
_BASE_INODES = 4
"""Where what is written over a base lies, where the overlay works, and what that makes for itself; and a directory for
each layer."""
_WRITABLE = (("w", "/workspace", 0o755), ("s", "/dev/shm", 0o1777), ("t", "/tmp", 0o1777))


def start_items(
    jail: Jail, plan: JailPlan, image: Image, disk_bytes: int, inodes: int, filter_path: Path
) -> list[Item]:
    """The jail tool's words, its descriptors, and the mounts that follow.

    Raises:
        ConfigError: the image has a path that this jail tool cannot be told.
    """
    items = [text(Tag.ARGV, word) for word in jail.argv(plan, image)]
    items += [number(Tag.AT, AGENT_FD), numbered(Tag.OPEN, FILTER_FD, str(filter_path)), *jail.start_items]
    items += [text(Tag.PLACES, STAGING_PATH), *view_items(image), text(Tag.DROP, AGENT_PATH)]
    items += [text(Tag.MASK, f"/proc/{name}") for name in plan.masked]
    items += [numbered(Tag.NODE, minor, path) for path, minor in DEVICE_MINORS.items()]
    return [*items, _tmpfs(disk_bytes, inodes), *_writable()]


def renew_items(disk_bytes: int, inodes: int, base: Attachment | None = None) -> list[Item]:
    """A new file system for all writable mounts of a jail; what the old one held is gone afterwards.

    Args:
        base: layers that lie under the new workspace.
    """
    own = 0 if base is None else _BASE_INODES + len(base.trees)
    drops = (text(Tag.DROP, target) for _, target, _ in _WRITABLE)
    return [_tmpfs(disk_bytes, inodes + own), *drops, *(_writable() if base is None else _over(base))]


def _over(base: Attachment) -> list[Item]:
    name, target, _ = _WRITABLE[0]
    trees = [text(Tag.LAYER, tree) for tree in base.trees]
    return [*trees, numbered(Tag.LAYERED, base.mode, name, target), *_writable()[1:]]


def _tmpfs(disk_bytes: int, inodes: int) -> Item:
    return text(Tag.TMPFS, STAGING_PATH, f"size={disk_bytes},nr_inodes={inodes + _OWN_INODES},mode=0755")


def _writable() -> list[Item]:
    return [numbered(Tag.BIND, mode, name, target) for name, target, mode in _WRITABLE]
