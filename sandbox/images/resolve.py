"""From an image's name to its mounts.

Owns: the list of names. Invariant: an unknown name is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sandbox.errors import ConfigError
from sandbox.estate.stage import writing_below
from sandbox.images.directory import directory_image
from sandbox.images.host import DEFAULT_USER, host_image
from sandbox.images.python import BUILD_REMEDY, python_image
from sandbox.images.types import Image

IMAGES: dict[str, Callable[[Path, int], Image]] = {"host": host_image, "python": python_image}


def resolve_image(name: str, state_dir: Path, *, foreign: bool = False, user: int = DEFAULT_USER) -> Image:
    """Resolve `host`, `python` or an absolute directory; cheap enough for every sandbox's start.

    Args:
        foreign: sandboxes run as uids other than this process's, so that a directory must be open to others.
        user: whom the first two know by a name; a directory image knows whom its own /etc/passwd names.

    Raises ConfigError (field `image`) for another name, a missing or closed directory or a toolchain not yet built.
    """
    if name in IMAGES:
        with writing_below(state_dir):  # an image's generated part may have to be made first
            return IMAGES[name](state_dir, user)
    if name.startswith("/") and "\0" not in name:
        return directory_image(name, state_dir, foreign)
    names = ", ".join(sorted(IMAGES))
    raise ConfigError("image", name, f"must be one of {names} (for python, {BUILD_REMEDY}) or an absolute directory")
