"""Limits, killing and accounting by cgroup v2 alone.

Layout, for set n of an engine E:  E/sN (limits), E/sN/agent (pid 1), E/sN/cK (one leaf per command): v2 wants
processes in leaves only. Every command gets a fresh leaf, so that its peak is its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

from sandbox.cgroup import files
from sandbox.cgroup.leaves import Leaves
from sandbox.cgroup.types import CgroupPlan, Live, Reading
from sandbox.types import MIB, Limits

AGENT_BYTES = 16 * MIB
AGENT_PIDS = 1
PERIOD_US = 100_000
CONTROLLERS = ("memory", "pids", "cpu")
_ENABLE = " ".join(f"+{name}" for name in CONTROLLERS)


class UnifiedSet:
    """The cgroups of one sandbox; see `sandbox.cgroup.types.CgroupSet` for the methods."""

    def __init__(self, root: str, index: int, limits: Limits) -> None:
        self._top = f"{root}/s{index}"
        self._agent = f"{self._top}/agent"
        self._limits = limits
        self._leaves = Leaves(self._top, reuse=False)
        self._made = False
        self._num_tenants = 0
        self._cpu_before_us = 0

    def start_plan(self) -> CgroupPlan:
        join = (f"{self._agent}/cgroup.procs",)
        if self._made:
            self._leaves.all_free()
            return CgroupPlan(join=join)
        self._made = True
        limits = self._limits
        memory = limits.memory_bytes + limits.disk_bytes + AGENT_BYTES
        write = [
            (f"{self._top}/memory.max", str(memory)),
            (f"{self._top}/pids.max", str(limits.pids + AGENT_PIDS)),
            (f"{self._top}/cpu.max", f"{int(limits.cpus * PERIOD_US)} {PERIOD_US}"),
            (f"{self._top}/cgroup.subtree_control", "+memory +pids"),
        ]
        if os.path.exists(f"{os.path.dirname(self._top)}/memory.swap.max"):
            write.append((f"{self._top}/memory.swap.max", "0"))
        return CgroupPlan((self._top, self._agent, self._leaves.first()), tuple(write), join)

    def kill_file(self) -> str | None:
        return f"{self._top}/cgroup.kill"

    def freezer(self) -> str | None:
        return self._top

    def remove_paths(self) -> tuple[str, ...]:
        return (self._top,)

    def residue_bytes(self) -> int:
        return 0  # commands get fresh leaves, and what is charged above them is reclaimed when it is needed

    def empty(self) -> None:
        """Nothing to give back."""

    def take_leaf(self) -> str | None:
        return self._leaves.take()

    def return_leaf(self, leaf: str) -> None:
        self._leaves.give_back(leaf)

    def idle(self) -> bool:
        return self._leaves.idle()

    def join_files(self, leaf: str) -> tuple[str, ...]:
        return (f"{leaf}/cgroup.procs",)

    def kill_leaf(self, leaf: str) -> None:
        files.write(f"{leaf}/cgroup.kill", "1")

    def reset_peak(self) -> None:
        """Nothing to do: a fresh leaf starts at zero."""

    def peak_bytes(self, leaf: str | None) -> int | None:
        peak = f"{leaf}/memory.peak"
        return int(files.read(peak)) if leaf and os.path.exists(peak) else None

    def read(self, leaf: str | None) -> Reading:
        return Reading(
            oom_kills=files.keyed(f"{self._top}/memory.events", "oom_kill"),
            pids_refused=files.keyed(f"{self._top}/pids.events", "max"),
            cpu_us=files.keyed(f"{leaf}/cpu.stat", "usage_usec") if leaf else None,
        )

    def begin(self) -> None:
        self._num_tenants += 1
        self._cpu_before_us = self._cpu_us()

    def _cpu_us(self) -> int:
        return files.keyed(f"{self._top}/cpu.stat", "usage_usec")

    def live(self) -> Live:
        # memory.peak starts anew only with the directory (before Linux 6.12), so a later tenant has none of its own.
        peak = f"{self._top}/memory.peak"
        own_peak = self._num_tenants == 1 and os.path.exists(peak)
        return Live(
            memory_bytes=int(files.read(f"{self._top}/memory.current")),
            peak_memory_bytes=int(files.read(peak)) if own_peak else None,
            cpu_us=self._cpu_us() - self._cpu_before_us,
            pids=max(0, int(files.read(f"{self._top}/pids.current")) - AGENT_PIDS),
        )


class UnifiedBackend:
    """One parent cgroup per engine, with the controllers handed down to its sandboxes."""

    name: Literal["v2"] = "v2"

    def __init__(self, parent: str, engine: str) -> None:
        self._parent = parent
        self._root = f"{parent}/rollout-{engine}"
        self.roots: tuple[str, ...] = (self._root,)
        self.enforced: Mapping[str, bool] = {"memory": True, "cpus": True, "pids": True, "disk": True}

    def open(self, memory_bytes: int, pids: int) -> None:
        files.write(f"{self._parent}/cgroup.subtree_control", _ENABLE)
        os.mkdir(self._root)
        try:
            files.write(f"{self._root}/memory.max", str(memory_bytes))
            files.write(f"{self._root}/pids.max", str(pids))
            files.write(f"{self._root}/cgroup.subtree_control", _ENABLE)
        except OSError:
            os.rmdir(self._root)
            raise

    def new_set(self, index: int, limits: Limits) -> UnifiedSet:
        return UnifiedSet(self._root, index, limits)
