"""Fixtures of the conformance suite: small limits, an arena that checks containment, and a cap around everything."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sandbox.cgroup.files import remove_tree
from sandbox.cgroup.hierarchies import find_hierarchies
from sandbox.host import SandboxConfig
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, JailName, Limits, SandboxSpec
from tests.sandbox.conformance.arena import Arena, open_arena

LIMITS = Limits(memory_bytes=96 * MIB, disk_bytes=16 * MIB, pids=24, file_size_bytes=64 * MIB)
MAX_PIDS = 3000


@pytest.fixture(scope="session", autouse=True)
def pids_cap() -> Iterator[None]:
    """Whatever a bomb does, this process and all that it starts stay below `MAX_PIDS`.

    By a cgroup where this user may make one; else by RLIMIT_NPROC, which binds every user but root (and sandboxes are
    never root).
    """
    proc = Path("/proc/self")
    places = find_hierarchies((proc / "mountinfo").read_text(), (proc / "cgroup").read_text())
    home, parent = places.v1.get("pids"), places.v1.get("pids")
    # An engine that divides its own cgroup (version 2, unless root does it at the host's root) is not moved.
    if not places.v1 and not Path(f"{places.v2_mount}/cgroup.type").exists():
        home, parent = places.v2, places.v2_mount
    try:
        cap = enter_cap(Path(parent or "/nowhere"))
    except OSError:
        _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
        wanted = num_threads(os.geteuid()) + MAX_PIDS
        most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, hard))
        yield
        return
    yield
    Path(home or "/nowhere", "cgroup.procs").write_text("0")
    leave_cap(cap)


def leave_cap(cap: Path) -> None:
    """Removes it, with what engines that other tests killed have left in it; waits for processes that just end."""
    deadline_s = time.monotonic() + 10
    while True:
        try:
            remove_tree(str(cap))
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def num_threads(uid: int) -> int:
    """Threads of that user on this host."""
    count = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if path.stat().st_uid == uid:
                count += len(os.listdir(path / "task"))
    return count


def enter_cap(parent: Path) -> Path:
    """A cgroup of that parent which holds this process and limits it; OSError, and nothing left, where it cannot be."""
    cap = parent / f"rollout-conformance-{os.getpid()}"
    cap.mkdir()
    try:
        if not (cap / "pids.max").exists():
            (parent / "cgroup.subtree_control").write_text("+pids")
        (cap / "pids.max").write_text(str(MAX_PIDS))
        (cap / "cgroup.procs").write_text("0")
    except OSError:
        cap.rmdir()
        raise
    return cap


@pytest.fixture
def full() -> bool:
    """Run the long form (`scripts/soak conformance`), with every number as large as it was asked for?"""
    return os.environ.get("ROLLOUT_CONFORMANCE") == "full"


@pytest.fixture
def spec(jail: JailName) -> SandboxSpec:
    """A small sandbox with an interpreter."""
    return SandboxSpec(image="python", limits=LIMITS, jail=jail)


@pytest.fixture
def config(state_dir: Path) -> SandboxConfig:
    """An engine on the shared state directory."""
    return SandboxConfig(state_dir=str(state_dir))


@pytest.fixture
async def arena(config: SandboxConfig, spec: SandboxSpec) -> AsyncIterator[Arena]:
    """An engine with a sibling; the test's hostile sandboxes come from `arena.hostile()`."""
    async with open_arena(config, spec) as arena:
        yield arena


@pytest.fixture
async def box(arena: Arena) -> AsyncIterator[Sandbox]:
    """A sandbox that the test may do anything to."""
    async with arena.hostile() as box:
        yield box
