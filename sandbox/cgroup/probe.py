"""Finds out, by trying, which cgroup backend works for this process.

Invariant: probing leaves nothing behind; a backend is only offered when its parent cgroups were really made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from sandbox.cgroup.absent import AbsentBackend
from sandbox.cgroup.hybrid import HybridBackend
from sandbox.cgroup.types import Backend
from sandbox.cgroup.unified import CONTROLLERS, UnifiedBackend
from sandbox.errors import CapabilityError

BackendName = Literal["auto", "hybrid", "v2", "none"]
_V1 = ("memory", "pids", "cpu")


class Hierarchies(msgspec.Struct, frozen=True):
    """Where this process stands: its own directory in each v1 hierarchy, and in the v2 tree."""

    v1: dict[str, str]
    v2: str | None
    v2_mount: str | None


def find_hierarchies(mountinfo: str, cgroup: str) -> Hierarchies:
    """Reads the texts of /proc/self/mountinfo and /proc/self/cgroup (pure)."""
    mounts: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2":
            mounts.setdefault("v2", (root, point))
        elif kind == "cgroup":
            for name in options.split(","):
                if name in _V1:
                    mounts.setdefault(name, (root, point))
    own: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(",") if names else ["v2"]:
            own[name] = path

    def directory(name: str) -> str | None:
        if name not in mounts or name not in own:
            return None
        root, point = mounts[name]
        path = own[name]
        if root != "/" and path.startswith(root):
            path = path[len(root) :]
        return point.rstrip("/") + (path if path != "/" else "")

    v1 = {name: found for name in _V1 if (found := directory(name)) is not None}
    return Hierarchies(v1, directory("v2"), mounts["v2"][1] if "v2" in mounts else None)


def _hybrid(places: Hierarchies, engine: str) -> HybridBackend | str:
    absent = [name for name in _V1 if name not in places.v1]
    if absent:
        return f"no cgroup v1 hierarchy for {', '.join(absent)}"
    if places.v2 is None or not os.path.exists(f"{places.v2_mount}/cgroup.procs"):
        return "no cgroup v2 tree beside cgroup v1"
    return HybridBackend({**places.v1, "v2": places.v2}, engine)


def _unified(places: Hierarchies, engine: str) -> UnifiedBackend | str:
    if places.v2_mount is None:
        return "no cgroup v2 tree"
    try:
        offered = Path(places.v2_mount, "cgroup.controllers").read_text().split()
    except OSError as error:  # something else is mounted over it, for example
        return f"the cgroup v2 tree at {places.v2_mount} cannot be read ({error.strerror})"
    absent = [name for name in CONTROLLERS if name not in offered]
    if absent:
        return f"the cgroup v2 tree offers no {', '.join(absent)}"
    return UnifiedBackend(places.v2_mount, engine)


def open_backend(
    wanted: BackendName, engine: str, memory_bytes: int, pids: int, record: Callable[[tuple[str, ...]], None]
) -> tuple[Backend, dict[str, str]]:
    """Opens the wanted backend, or for `auto` the first that works, with the caps for all sandboxes together.

    Args:
        record: is told the directories before they are made, so that they can be found after a crash.

    Returns:
        the backend, and for each one that was tried and failed, why.

    Raises:
        CapabilityError: a backend was named and does not work here.
    """
    places = find_hierarchies(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    reasons: dict[str, str] = {}
    makers = {"hybrid": _hybrid, "v2": _unified}
    for name, make in makers.items():
        if wanted not in ("auto", name):
            continue
        candidate = make(places, engine)
        if isinstance(candidate, str):
            reasons[name] = candidate
            continue
        record(candidate.roots)
        try:
            candidate.open(memory_bytes, pids)
        except OSError as error:
            reasons[name] = f"{error.filename or 'cgroup'}: {error.strerror}"
            record(())
            continue
        return candidate, reasons
    if wanted not in ("auto", "none"):
        raise CapabilityError(f"cgroup backend {wanted}: {reasons[wanted]}", "use cgroup_backend = 'auto'")
    record(())  # an engine without cgroups is on record too: it answers for its processes
    return AbsentBackend(), reasons
