"""Puts numpy, pytest and what they need into a toolchain image.

Owns: nothing. Invariant: compiled packages are copied only between interpreters of one binary interface; what the
running environment lacks is installed by pip, and a package that cannot be had is an error, never a silent gap.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from sandbox.errors import CapabilityError
from sandbox.images.interpreter import Interpreter

PACKAGES = ("numpy", "pytest", "pluggy", "iniconfig", "packaging", "pygments")
_SKIPPED_DIRECTORIES = frozenset({"tests", "__pycache__"})


def package_versions(interpreter: Interpreter) -> dict[str, str]:
    """Version of each package that can be copied from the running environment; others are absent."""
    return {name: files.version for name, files in _copyable(interpreter)}


def add_packages(interpreter: Interpreter, target: Path) -> None:
    """Fill `target` (a site-packages directory). Raises CapabilityError when pip is needed and fails."""
    target.mkdir(parents=True, exist_ok=True)
    missing = set(PACKAGES)
    for name, distribution in _copyable(interpreter):
        _copy(distribution, target)
        missing.discard(name)
    if missing:
        _install(sorted(missing), interpreter, target)


def _copyable(interpreter: Interpreter) -> Iterator[tuple[str, importlib.metadata.Distribution]]:
    if interpreter.soabi != sysconfig.get_config_var("SOABI"):
        return
    for name in PACKAGES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.files:
            yield name, distribution


def _copy(distribution: importlib.metadata.Distribution, target: Path) -> None:
    for file in distribution.files or ():
        parts = file.parts
        source = Path(str(file.locate()))
        if ".." in parts or file.is_absolute() or _SKIPPED_DIRECTORIES & set(parts) or not source.is_file():
            continue
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / file)


def _install(names: list[str], interpreter: Interpreter, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(interpreter.executable), "install", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--no-compile", "--target", str(target), *names]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=600, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", b"") or b""
        words = detail.decode("utf-8", "replace").strip().splitlines()[-1:] or [str(error)]
        raise CapabilityError(
            f"{', '.join(names)} cannot be installed for {interpreter.executable} ({words[0]})",
            "install them beside this program, or allow pip to reach a package index",
        ) from error
