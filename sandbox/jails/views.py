"""How an image is covered by overlays, so that siblings share its bytes and nothing else.

Owns: which overlays a sandbox gets. Invariant: as few as can be, since each is a file system of its own and the
kernel's cost of a memory group grows with their number: the mounts of one image that lie side by side on the host
(the top-level directories of a directory image; the generated /etc and the toolchain) are parts of one overlay over
the directory that holds them.

A jail tool can only bind an image's directories. A bound file is one inode for every sandbox, so a lock on it would
be felt by the siblings, and a watch would tell which files they open. Device nodes are no part of this: an overlay
in a user namespace holds none. A root engine makes own ones; under another user locks on `/dev/null` are shared.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from sandbox.images.types import Image, Mount
from sandbox.protocol.wire import Item, Tag, text

_SOURCES = "/.rollout"


class View(NamedTuple):
    """One overlay, and which mounts of the image are replaced by parts of it."""

    directory: str
    """What lies under the overlay: a path inside the jail, as the jail tool built it."""
    source: str | None
    """Directory of the host that the jail tool binds there for the purpose; None where the image does already."""
    parts: tuple[tuple[str, str], ...]
    """Path below the directory (`""` for itself), and the mount inside that it replaces."""


def plan_views(image: Image) -> tuple[View, ...]:
    """The overlays of that image; a pure function."""
    beside: dict[str, list[Mount]] = {}
    for mount in image.mounts:
        if mount.kind != "symlink":
            # What lies at the host's root beside a directory is no image's, so that one stays alone.
            parent = os.path.dirname(mount.source)
            beside.setdefault(mount.source if parent == "/" else parent, []).append(mount)
    views = []
    for number, (parent, mounts) in enumerate(beside.items()):
        first = mounts[0]
        if len(mounts) == 1 and first.kind == "ro_bind":
            views.append(View(first.target, None, (("", first.target),)))
        else:
            parts = tuple((os.path.basename(mount.source), mount.target) for mount in mounts)
            views.append(View(f"{_SOURCES}/{number}", parent, parts))
    return tuple(views)


def sources(image: Image) -> tuple[tuple[str, str], ...]:
    """What a jail tool binds beside the image, read-only: directory of the host, path inside."""
    return tuple((view.source, view.directory) for view in plan_views(image) if view.source is not None)


def view_items(image: Image) -> list[Item]:
    """What the warden does to cover the image; comes after its tmpfs, and before that one's parts."""
    items = []
    for view in plan_views(image):
        items.append(text(Tag.OVERLAY, view.directory))
        items += [text(Tag.SHOW, part, target) for part, target in view.parts]
    items += [text(Tag.DROP, directory) for _, directory in sources(image)]
    return items


def why_shared(error: int, image: Image, mountinfo: str) -> str:
    """Why the image's directories have no overlays: the errno of the attempt, and what this host mounts below them.

    Args:
        mountinfo: text of `/proc/self/mountinfo`.
    """
    places = [line.split()[4] for line in mountinfo.splitlines()]
    roots = tuple(f"{mount.source}/" for mount in image.mounts if mount.kind == "ro_bind")
    below = [place for place in places if place.startswith(roots)]
    words = f"overlay mounts fail here ({os.strerror(error)})"
    return f"{words}: file systems are mounted below the image, such as {below[0]}" if below else words
