"""Limits by cgroup v1, killing and accounting by the v2 tree beside it.

Layout, for set n of an engine E:  <memory>/E/sN and <memory>/E/sN/c (commands), <pids>/E/sN, <cpu>/E/sN,
<v2>/E/sN and leaves <v2>/E/sN/cK. The agent lives in sN and commands in sN/c, with less memory: a workspace full
of data lets a command die, never the agent. The kernel counts an out-of-memory kill in the victim's own memory cgroup
alone, so commands at once (and background processes) are told apart by sN/c/mK for the leaves after the first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from sandbox.cgroup import files, swap
from sandbox.cgroup.leaves import Leaves
from sandbox.cgroup.types import CgroupPlan, Live, Reading
from sandbox.types import MIB, Limits

AGENT_BYTES = 16 * MIB
AGENT_PIDS = 1
PERIOD_US = 100_000
_MORE_MEMORY_LEAVES = 4
"""A host has 65,535 memory cgroups at most, so further leaves share the first one's account."""


class HybridSet:
    """The cgroups of one sandbox; see `sandbox.cgroup.types.CgroupSet` for the methods."""

    def __init__(self, roots: Mapping[str, str], index: int, limits: Limits) -> None:
        self._limits = limits
        self._memory, self._pids, self._cpu, self._tree = (
            f"{roots[name]}/s{index}" for name in ("memory", "pids", "cpu", "v2")
        )
        self._commands = f"{self._memory}/c"
        self._leaves = Leaves(self._tree, reuse=True)
        self._memory_of: dict[str, str] = {}  # leaves' accounts
        self._made = False
        self._cpu_before_us = 0

    def start_plan(self) -> CgroupPlan:
        join = tuple(f"{path}/cgroup.procs" for path in (self._tree, self._memory, self._pids, self._cpu))
        if self._made:
            self._leaves.all_free()
            return CgroupPlan(join=join)
        self._made = True
        limits = self._limits
        memory = limits.memory_bytes + limits.disk_bytes
        first = self._leaves.first()
        self._memory_of = {first: self._commands}
        make = (self._tree, first, self._memory, self._commands, self._pids, self._cpu)
        write = [
            *self._cap_memory(self._memory, memory + AGENT_BYTES),
            *self._cap_memory(self._commands, memory),
            (f"{self._pids}/pids.max", str(limits.pids + AGENT_PIDS)),
            (f"{self._cpu}/cpu.cfs_period_us", str(PERIOD_US)),
            (f"{self._cpu}/cpu.cfs_quota_us", str(int(limits.cpus * PERIOD_US))),
        ]
        return CgroupPlan(make, tuple(write), join)

    def _cap_memory(self, directory: str, value: int) -> list[tuple[str, str]]:
        writes = [(f"{directory}/memory.limit_in_bytes", str(value))]
        if swap_is_counted(os.path.dirname(self._memory)):
            writes.append((f"{directory}/memory.memsw.limit_in_bytes", str(value)))
        return writes

    def kill_file(self) -> str | None:
        return f"{self._tree}/cgroup.kill"

    def freezer(self) -> str | None:
        return self._tree

    def remove_paths(self) -> tuple[str, ...]:
        return self._tree, self._memory, self._pids, self._cpu

    def residue_bytes(self) -> int:
        return int(files.read(f"{self._memory}/memory.usage_in_bytes"))

    def empty(self) -> None:
        files.write(f"{self._commands}/memory.force_empty", "0")

    def take_leaf(self) -> str | None:
        leaf = self._leaves.take()
        if leaf not in self._memory_of:
            self._memory_of[leaf] = self._make_memory_leaf()
        return leaf

    def _make_memory_leaf(self) -> str:
        number = len(self._memory_of)
        if number <= _MORE_MEMORY_LEAVES:
            with suppress(OSError):  # the host has no number left for it
                os.mkdir(directory := f"{self._commands}/m{number}")
                return directory
        return self._commands

    def return_leaf(self, leaf: str) -> None:
        self._leaves.give_back(leaf)

    def idle(self) -> bool:
        return self._leaves.idle()

    def join_files(self, leaf: str) -> tuple[str, ...]:
        return f"{self._memory_of[leaf]}/cgroup.procs", f"{leaf}/cgroup.procs"

    def kill_leaf(self, leaf: str) -> None:
        files.write(f"{leaf}/cgroup.kill", "1")

    def reset_peak(self) -> None:
        files.write(f"{self._commands}/memory.max_usage_in_bytes", "0")

    @property
    def peak_is_the_leafs(self) -> bool:
        return False

    def peak_bytes(self, leaf: str | None) -> int | None:
        return int(files.read(f"{self._commands}/memory.max_usage_in_bytes"))

    def read(self, leaf: str | None) -> Reading:
        memory = self._commands if leaf is None else self._memory_of[leaf]
        return Reading(
            oom_kills=files.keyed(f"{memory}/memory.oom_control", "oom_kill"),
            pids_refused=files.keyed(f"{self._pids}/pids.events", "max"),
            cpu_us=files.keyed(f"{leaf}/cpu.stat", "usage_usec") if leaf else None,
        )

    def begin(self) -> None:
        files.write(f"{self._memory}/memory.max_usage_in_bytes", "0")
        self._cpu_before_us = self._cpu_us()

    def _cpu_us(self) -> int:
        return files.keyed(f"{self._tree}/cpu.stat", "usage_usec")

    def live(self) -> Live:
        return Live(
            memory_bytes=int(files.read(f"{self._memory}/memory.usage_in_bytes")),
            peak_memory_bytes=int(files.read(f"{self._memory}/memory.max_usage_in_bytes")),
            cpu_us=self._cpu_us() - self._cpu_before_us,
            pids=max(0, int(files.read(f"{self._pids}/pids.current")) - AGENT_PIDS),
        )


def swap_is_counted(directory: str) -> bool:
    """Does this kernel account swap (`memory.memsw.*`)?"""
    return os.path.exists(f"{directory}/memory.memsw.limit_in_bytes")


class HybridBackend:
    """Parents in each v1 hierarchy and in the v2 tree, below the cgroups that the engine runs in."""

    name: Literal["hybrid"] = "hybrid"

    def __init__(self, parents: Mapping[str, str], engine: str) -> None:
        self._roots = {kind: f"{parent}/rollout-{engine}" for kind, parent in parents.items()}
        self.roots: tuple[str, ...] = tuple(self._roots[kind] for kind in ("v2", "memory", "pids", "cpu"))
        self.enforced: Mapping[str, bool] = {"memory": True, "cpus": True, "pids": True, "disk": True}
        self.note = ""
        self.gap = ""

    def open(self, memory_bytes: int, pids: int) -> None:
        made: list[str] = []
        try:
            for root in self.roots:
                os.mkdir(root)
                made.append(root)
            memory = self._roots["memory"]
            hierarchy = Path(memory, "memory.use_hierarchy")
            if hierarchy.exists() and hierarchy.read_text().strip() == "0":
                hierarchy.write_text("1")
            files.write(f"{memory}/memory.limit_in_bytes", str(memory_bytes))
            if swap_is_counted(memory):
                files.write(f"{memory}/memory.memsw.limit_in_bytes", str(memory_bytes))
            elif swap.in_use():
                self.gap = swap.WHY_UNCOUNTED
                self.enforced = {**self.enforced, "memory": False}
            files.write(f"{self._roots['pids']}/pids.max", str(pids))
        except OSError:
            for root in reversed(made):
                os.rmdir(root)
            raise

    def new_set(self, index: int, limits: Limits) -> HybridSet:
        return HybridSet(self._roots, index, limits)
