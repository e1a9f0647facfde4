"""Other ways to run a program, isolated or not, as peers of the sandbox.

Owns how each of them is called. Invariant: all run the same program, with stdin from /dev/null and both outputs
collected, through the same asyncio subprocess machinery (but the raw clone, which has its own helper).
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from bench.peers.helper import HelperPeer, open_helper
from bench.records import CannotMeasure
from sandbox.images.host import host_mounts
from sandbox.images.types import Mount

PROGRAM = "/usr/bin/true"


async def run_bare(argv: Sequence[str]) -> None:
    """Runs a program to its end through asyncio.

    Raises:
        CannotMeasure: it failed.
    """
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    _, stderr = await process.communicate()
    if process.returncode:
        raise _failed(argv, process.returncode, stderr)


def run_blocking(argv: Sequence[str]) -> None:
    """Runs a program to its end through the standard library, whose `vfork` copies nothing; for threads.

    Raises:
        CannotMeasure: it failed.
    """
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise _failed(argv, done.returncode, done.stderr)


def _failed(argv: Sequence[str], status: int | None, stderr: bytes) -> CannotMeasure:
    words = " ".join(stderr.decode(errors="replace").split())
    return CannotMeasure(f"{argv[0]} ended with status {status}: {words[-300:]}")


def bwrap_argv(bwrap: Path, state_dir: Path) -> list[str]:
    """A one-shot bubblewrap with every namespace, over the same read-only host image as our sandboxes."""
    mounts = [word for mount in host_mounts(state_dir) for word in _bwrap_mount(mount)]
    return [
        *(str(bwrap), "--unshare-all", "--cap-drop", "ALL", *mounts),
        *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--", PROGRAM),
    ]


def _bwrap_mount(mount: Mount) -> tuple[str, str, str]:
    return ("--symlink" if mount.kind == "symlink" else "--ro-bind", mount.source, mount.target)


def nsjail_argv(nsjail: Path, state_dir: Path) -> list[str]:
    """A one-shot nsjail with the same mounts."""
    mounts: list[str] = []
    for mount in host_mounts(state_dir):
        flag = "--symlink" if mount.kind == "symlink" else "--bindmount_ro"
        mounts += [flag, f"{mount.source}:{mount.target}"]
    return [
        *(str(nsjail), "--mode", "o", "--really_quiet", "--user", "1000", "--group", "1000", *mounts),
        *("--tmpfsmount", "/tmp", "--", PROGRAM),
    ]


CLONE = "raw clone, every namespace"


def open_raw_clone() -> AbstractAsyncContextManager[HelperPeer]:
    """The floor: see `helpers.raw_clone`."""
    return open_helper(CLONE, "raw_clone", PROGRAM, flags=("-S", "-E"))
