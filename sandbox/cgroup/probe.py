"""Finds out, by trying, which cgroup backend works for this process.

Invariant: probing leaves nothing behind; a backend is only offered when its parent cgroups were really made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal

from sandbox.cgroup.absent import AbsentBackend
from sandbox.cgroup.delegation import find
from sandbox.cgroup.hierarchies import V1, Hierarchies, own_hierarchies
from sandbox.cgroup.hybrid import HybridBackend
from sandbox.cgroup.types import Backend
from sandbox.cgroup.unified import UnifiedBackend
from sandbox.errors import CapabilityError

BackendName = Literal["auto", "hybrid", "v2", "none"]


def _hybrid(places: Hierarchies, engine: str) -> HybridBackend | str:
    absent = [name for name in V1 if name not in places.v1]
    if absent:
        return f"no cgroup v1 hierarchy for {', '.join(absent)}"
    if places.v2 is None or not os.path.exists(f"{places.v2_mount}/cgroup.procs"):
        return "no cgroup v2 tree beside cgroup v1"
    return HybridBackend({**places.v1, "v2": places.v2}, engine)


def _unified(places: Hierarchies, engine: str) -> UnifiedBackend | str:
    place = find(places)
    return place if isinstance(place, str) else UnifiedBackend(place, engine)


def open_backend(
    wanted: BackendName,
    engine: str,
    memory_bytes: int,
    pids: int,
    agents_bytes: int,
    record: Callable[[tuple[str, ...]], None],
) -> tuple[Backend, dict[str, str]]:
    """Opens the wanted backend, or for `auto` the first that works, with the caps for all sandboxes together.

    Args:
        agents_bytes: of them, what all agents may take.
        record: is told the directories before they are made, so that they can be found after a crash.

    Returns:
        the backend, and why for each one that was tried and failed, or does not enforce every limit.

    Raises:
        CapabilityError: a backend was named and does not work here.
    """
    places = own_hierarchies()
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
            candidate.open(memory_bytes, pids, agents_bytes)
        except OSError as error:
            reasons[name] = f"{error.filename or 'cgroup'}: {error.strerror}"
            record(())
            continue
        if candidate.gap:
            reasons[name] = candidate.gap
        return candidate, reasons
    if wanted not in ("auto", "none"):
        raise CapabilityError(f"cgroup backend {wanted}: {reasons[wanted]}", "use cgroup_backend = 'auto'")
    record(())  # an engine without cgroups is on record too: it answers for its processes
    return AbsentBackend(), reasons
