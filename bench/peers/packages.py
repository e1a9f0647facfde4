"""Peers from PyPI: each in a virtual environment of its own, at the version named here.

Owns those environments (below `cache`). Invariant: the project's own environment stays as it is, and one peer that
cannot be installed takes no other with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path

import msgspec

from bench.peers.cache import call, obtain
from bench.peers.helper import HelperPeer, open_helper
from bench.records import CannotMeasure

_PROBE_S = 20.0


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A peer that is a Python package."""

    name: str
    """Its row."""
    requirement: str
    module: str
    """Of `bench.peers.helpers`."""
    arguments: tuple[str, ...] = ()
    """`{environments}` stands for a folder with a virtual environment in `bench/.venv`."""
    python: tuple[int, int] = (3, 11)
    """The oldest that it takes."""
    needs_bwrap: bool = False


PACKAGES = (
    Package(
        name="bubble-sandbox",
        requirement="bubble-sandbox==0.13",
        module="bubble",
        arguments=("{environments}",),
        python=(3, 12),
        needs_bwrap=True,
    ),
    Package(name="deepagents-sandbox", requirement="deepagents-sandbox==0.0.2", module="deepagents", needs_bwrap=True),
    Package(name="inspect-ai local (no isolation)", requirement="inspect-ai==0.3.285", module="inspect_local"),
    Package(
        name="swe-rex local, execute (no isolation)",
        requirement="swe-rex==1.4.0",
        module="swerex_local",
        arguments=("execute",),
    ),
    Package(
        name="swe-rex local, bash session (no isolation)",
        requirement="swe-rex==1.4.0",
        module="swerex_local",
        arguments=("session",),
    ),
)


def open_package(package: Package, bin_dir: Path | None, environment: Path) -> AbstractAsyncContextManager[HelperPeer]:
    """The peer, driven by its helper; `bin_dir` holds the bubblewrap that it will find.

    Raises:
        CannotMeasure: on entering: it cannot be imported.
    """
    arguments = [word.format(environments=environment / "environments") for word in package.arguments]
    path = os.environ.get("PATH", os.defpath)
    env = {} if bin_dir is None else {"PATH": f"{bin_dir}:{path}"}
    return open_helper(package.name, package.module, *arguments, python=environment / "bin" / "python", env=env)


def environment_of(package: Package, *, may_make: bool) -> Path:
    """The package's virtual environment, made if need be; blocks.

    Raises:
        CannotMeasure: there is no fitting interpreter, or it could not be installed.
    """
    return obtain(package.requirement, partial(_make, package), may_make=may_make)


def _make(package: Package, folder: Path) -> None:
    python = find_python(package.python)
    call((python, "-m", "venv", folder))
    call((folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", package.requirement))
    (folder / "environments" / "bench").mkdir(parents=True)
    (folder / "environments" / "bench" / ".venv").symlink_to(folder)


def find_python(oldest: tuple[int, int]) -> Path:
    """An interpreter of at least that version: ours, else one that lies where interpreters lie.

    Raises:
        CannotMeasure: there is none.
    """
    if sys.version_info >= oldest:
        return Path(sys.executable)
    for candidate in _interpreters():
        with suppress(OSError, subprocess.SubprocessError):
            question = f"import sys, ensurepip; sys.exit(sys.version_info < {oldest})"
            answer = subprocess.run([candidate, "-c", question], capture_output=True, timeout=_PROBE_S, check=False)
            if answer.returncode == 0:
                return candidate
    raise CannotMeasure(f"needs Python {oldest[0]}.{oldest[1]} or newer, with venv; none is on PATH")


def _interpreters() -> Iterator[Path]:
    for minor in range(14, 11, -1):
        if found := shutil.which(f"python3.{minor}"):
            yield Path(found)
    yield from sorted(Path.home().glob(".pyenv/versions/3.*/bin/python"), reverse=True)
