"""Makes sure that the toolchain image exists before a command needs it.

Invariant: the first command on a host builds it once, saying so; every later one finds it in a moment.
"""

from __future__ import annotations

import sys
from pathlib import Path


def ensure_toolchain(state_dir: Path | None) -> None:
    """Builds the `python` image in the state directory (the default one for None) unless it is there.

    Raises:
        ConfigError: the state directory cannot be used.
        CapabilityError: the image's packages cannot be had.
    """
    from sandbox.estate.state import default_state_dir, open_state_dir
    from sandbox.images.python import build_python_image

    directory = open_state_dir(state_dir or default_state_dir())
    build_python_image(directory, progress=lambda line: print(f"image python: {line}", file=sys.stderr))
