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
        _copy_libraries(root, found)
    (root / "bin").symlink_to("usr/bin")
    for directory, _, _ in os.walk(root):
        os.chmod(directory, 0o755)
    return root


def add_python(root: Path, toolchain: Path) -> None:
    """Adds the toolchain's interpreter, without packages, at /opt/python."""
    shutil.copytree(toolchain, root / "opt/python", symlinks=True, ignore=shutil.ignore_patterns("site-packages"))
    _copy_libraries(root, str(toolchain / "bin" / "python3"))
    for directory, _, _ in os.walk(root):
        os.chmod(directory, 0o755)


def _copy_libraries(root: Path, program: str) -> None:
    loaded = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for library in re.findall(r"(/\S+\.so\S*) \(", loaded):
        if Path(library).parts[1] in ("lib", "lib64", "usr"):
            _copy(root, Path(library).resolve(), Path(os.path.normpath(library)))


def _copy(root: Path, source: Path, target: Path) -> None:
    copy = root / target.relative_to("/")
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        copy.chmod(0o755)
