"""The package's build backend: setuptools, plus the compilation of the sandbox's C program.

Invariant: the C program is compiled before setuptools collects files, so that a wheel and an
editable install both carry it. A source distribution carries the sources alone.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import build_meta as _setuptools

ROOT = Path(__file__).resolve().parent.parent

get_requires_for_build_sdist = _setuptools.get_requires_for_build_sdist
get_requires_for_build_wheel = _setuptools.get_requires_for_build_wheel
get_requires_for_build_editable = _setuptools.get_requires_for_build_editable
prepare_metadata_for_build_wheel = _setuptools.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _setuptools.prepare_metadata_for_build_editable
build_sdist = _setuptools.build_sdist


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """A wheel with the compiled program inside."""
    _compile()
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    settings = {**(config_settings or {}), "--build-option": ["--plat-name", platform]}
    return _setuptools.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """An editable install; the program is compiled into the source tree."""
    _compile()
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


def _compile() -> None:
    """Puts the program where the package looks for the one it came with, and removes older ones."""
    sys.path.insert(0, str(ROOT))
    try:
        from sandbox.build import NATIVE, compile_native, source_hash
    finally:
        sys.path.remove(str(ROOT))
    shutil.rmtree(NATIVE / "bin", ignore_errors=True)
    compile_native(NATIVE / "bin" / source_hash())
