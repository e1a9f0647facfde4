"""What the container peers share: a small root file system, a place for it, and the removal of what they leave.

Invariant: what is removed was named by a benchmark that is dead, or by this one; a cgroup only when it is empty.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread

from bench.peers.programs import PROGRAM
from bench.records import CannotMeasure

PROGRAMS = (PROGRAM, "/usr/bin/sleep")
_PREFIX = "rollout-bench"
_SCRATCH = Path("/tmp")  # where a socket's path stays short, and a namespace with its own /run sees it
_CGROUPS = Path("/sys/fs/cgroup")
_SWEEP_S = 10.0
_LOOK_S = 0.05


def small_tree(root: Path) -> None:
    """Copies `PROGRAMS` and the libraries that they need into an empty root file system; blocks."""
    for program in PROGRAMS:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=30, check=False)
        for name in {program, *re.findall(r"(?<!\S)/\S+", listed.stdout)}:
            target = root / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, target)
            target.chmod(0o755)


def cgroup_name(peer: str) -> str:
    """A parent for the peer's cgroups, at the root of the hierarchies."""
    return f"{_PREFIX}-{peer}-{os.getpid()}"


@asynccontextmanager
async def scratch_folder(peer: str) -> AsyncIterator[Path]:
    """A temporary folder; removes those that killed benchmarks have left, too."""
    await anyio.to_thread.run_sync(_remove_dead_folders, peer)
    prefix = f"bench-{peer}-{os.getpid()}-"
    async with anyio.TemporaryDirectory(prefix=prefix, dir=str(_SCRATCH), ignore_cleanup_errors=True) as name:
        yield Path(name)


def _remove_dead_folders(peer: str) -> None:
    for left in _SCRATCH.glob(f"bench-{peer}-*-*"):
        pid = left.name.removeprefix(f"bench-{peer}-").partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)


async def sweep_cgroups() -> None:
    """Removes the cgroups of this process's peers and of dead benchmarks' peers, as soon as they are empty.

    Raises:
        CannotMeasure: ours did not become empty in time.
    """
    deadline = time.monotonic() + _SWEEP_S
    while left := [path for path in _parents() if not _remove(path) and path.name.endswith(f"-{os.getpid()}")]:
        if time.monotonic() > deadline:
            raise CannotMeasure(f"left behind: {', '.join(map(str, left))}")
        await anyio.sleep(_LOOK_S)


def _parents() -> list[Path]:
    found = [*_CGROUPS.glob(f"{_PREFIX}-*-*"), *_CGROUPS.glob(f"*/{_PREFIX}-*-*")]
    return [path for path in found if _is_ours_or_nobodys(path.name)]


def _is_ours_or_nobodys(name: str) -> bool:
    pid = name.rpartition("-")[2]
    return pid.isdecimal() and (int(pid) == os.getpid() or not Path("/proc", pid).exists())


def _remove(path: Path) -> bool:
    """Removes a tree of empty cgroups; False where something is not empty."""
    for folder, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)
    return not path.exists()
