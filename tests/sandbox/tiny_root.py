"""A root file system of a few files, for tests of directory images."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

PROGRAMS = ("sh", "cat", "ls", "id", "touch", "sleep", "true", "head")


def make_tiny_root(root: Path) -> Path:
    """Fills `root` with a shell, a few tools and the libraries that they load; every uid can read it."""
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found is not None, name
        _copy(root, Path(found).resolve(), Path("/usr/bin", name))
        loaded = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+\.so\S*) \(", loaded):
            _copy(root, Path(library).resolve(), Path(os.path.normpath(library)))
    (root / "bin").symlink_to("usr/bin")
    for directory, _, _ in os.walk(root):
        os.chmod(directory, 0o755)
    return root


def _copy(root: Path, source: Path, target: Path) -> None:
    copy = root / target.relative_to("/")
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        copy.chmod(0o755)
