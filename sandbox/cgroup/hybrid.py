"""Limits by cgroup v1, killing and accounting by the v2 tree beside it.

Layout, for set n of an engine E: <memory>/E/sN, <pids>/E/sN, <cpu>/E/sN, <v2>/E/sN and its leaves <v2>/E/sN/cK. All
agents live in E/agents of each hierarchy: what runs out of memory is a command, never an agent. The kernel counts an
out-of-memory kill in the victim's own memory cgroup alone, so commands at once (and background processes) are told
apart by <memory>/E/sN/mK for the leaves after the first.
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
from sandbox.types import Limits

PERIOD_US = 100_000
_MORE_MEMORY_LEAVES = 4
"""A host has 65,535 memory cgroups at most, so further leaves share the first one's account."""
AGENTS = "agents"
AGENTS_SHARES = 262_144
"""Of the processors, beside 1,024 of each sandbox: agents do little, and every command waits for one."""


class HybridSet:
    """The cgroups of one sandbox; see `sandbox.cgroup.types.CgroupSet` for the methods."""

    def __init__(self, roots: Mapping[str, str], index: int, limits: Limits) -> None:
        self._limits = limits
        self._memory, self._pids, self._cpu, self._tree = (
            f"{roots[name]}/s{index}" for name in ("memory", "pids", "cpu", "v2")
        )
        self._leaves = Leaves(self._tree, reuse=True)
        self._memory_of: dict[str, str] = {}  # leaves' accounts
        self._made = False
        self._cpu_before_us = 0
        self._peak_bytes = 0  # of earlier commands of this tenant
        self._num_lent = 0  # leaves, to this tenant

    def start_plan(self) -> CgroupPlan:
        if self._made:
            self._leaves.all_free()
            return CgroupPlan()
        self._made = True
        limits = self._limits
        first = self._leaves.first()
        self._memory_of = {first: self._memory}
        make = (self._tree, first, self._memory, self._pids, self._cpu)
        write = [
            *_cap_memory(self._memory, limits.memory_bytes + limits.disk_bytes),
            (f"{self._pids}/pids.max", str(limits.pids)),
            (f"{self._cpu}/cpu.cfs_period_us", str(PERIOD_US)),
            (f"{self._cpu}/cpu.cfs_quota_us", str(int(limits.cpus * PERIOD_US))),
        ]
        return CgroupPlan(make, tuple(write))

    def kill_file(self) -> str | None:
        return f"{self._tree}/cgroup.kill"

    def freezer(self) -> str | None:
        return self._tree

    def is_empty(self) -> bool:
        return not files.populated(self._tree) and self._num_pids() == 0

    def is_full(self) -> bool:
        return self._num_pids() >= self._limits.pids

    def _num_pids(self) -> int:
        return int(files.read(f"{self._pids}/pids.current"))

    def remove_paths(self) -> tuple[str, ...]:
        return self._tree, self._memory, self._pids, self._cpu

    def residue_bytes(self) -> int:
        return int(files.read(f"{self._memory}/memory.usage_in_bytes"))

    def empty(self) -> None:
        files.write(f"{self._memory}/memory.force_empty", "0")

    def take_leaf(self) -> str | None:
        leaf = self._leaves.take()
        if leaf not in self._memory_of:
            self._memory_of[leaf] = self._make_memory_leaf()
        return leaf

    def _make_memory_leaf(self) -> str:
        number = len(self._memory_of)
        if number <= _MORE_MEMORY_LEAVES:
            with suppress(OSError):  # the host has no number left for it
                os.mkdir(directory := f"{self._memory}/m{number}")
                return directory
        return self._memory

    def return_leaf(self, leaf: str) -> None:
        self._leaves.give_back(leaf)

    def idle(self) -> bool:
        return self._leaves.idle()

    def join_files(self, leaf: str) -> tuple[str, ...]:
        return *(
            f"{path}/cgroup.procs" for path in (self._memory_of[leaf], self._pids, self._cpu)
        ), f"{leaf}/cgroup.procs"

    def kill_leaf(self, leaf: str) -> None:
        files.write(f"{leaf}/cgroup.kill", "1")

    def reset_peak(self) -> None:
        if self._num_lent == 1:
            return  # `begin` has done so, and nothing has run since
        self._peak_bytes = max(self._peak_bytes, self._read_peak())
        files.write(f"{self._memory}/memory.max_usage_in_bytes", "0")

    def _read_peak(self) -> int:
        return int(files.read(f"{self._memory}/memory.max_usage_in_bytes"))

    @property
    def peak_is_the_leafs(self) -> bool:
        return False

    def peak_bytes(self, leaf: str | None) -> int | None:
        return self._read_peak()

    def read(self, leaf: str | None) -> Reading:
        memory = self._memory if leaf is None else self._memory_of[leaf]
        return Reading(
            oom_kills=files.keyed(f"{memory}/memory.oom_control", "oom_kill"),
            pids_refused=files.keyed(f"{self._pids}/pids.events", "max"),
            cpu_us=files.keyed(f"{leaf}/cpu.stat", "usage_usec") if leaf else None,
        )

    def begin(self) -> None:
        files.write(f"{self._memory}/memory.max_usage_in_bytes", "0")
        self._peak_bytes = self._num_lent = 0
        self._cpu_before_us = self._cpu_us()

    def _cpu_us(self) -> int:
        return files.keyed(f"{self._tree}/cpu.stat", "usage_usec")

    def live(self) -> Live:
        return Live(
            memory_bytes=int(files.read(f"{self._memory}/memory.usage_in_bytes")),
            peak_memory_bytes=max(self._peak_bytes, self._read_peak()),
            cpu_us=self._cpu_us() - self._cpu_before_us,
            pids=self._num_pids(),
        )


def _cap_memory(directory: str, value: int) -> list[tuple[str, str]]:
    writes = [(f"{directory}/memory.limit_in_bytes", str(value))]
    if swap_is_counted(os.path.dirname(directory)):
        writes.append((f"{directory}/memory.memsw.limit_in_bytes", str(value)))
    return writes


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
        self._agents = {kind: f"{root}/{AGENTS}" for kind, root in self._roots.items()}
        self.agents: tuple[str, ...] = tuple(f"{directory}/cgroup.procs" for directory in self._agents.values())
        self.note = ""
        self.gap = ""

    def open(self, memory_bytes: int, pids: int, agents_bytes: int) -> None:
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
            for directory in self._agents.values():
                os.mkdir(directory)
                made.append(directory)
            files.carry_out((), _cap_memory(self._agents["memory"], agents_bytes))
            files.write(f"{self._agents['cpu']}/cpu.shares", str(AGENTS_SHARES))
        except OSError:
            for root in reversed(made):
                os.rmdir(root)
            raise

    def new_set(self, index: int, limits: Limits) -> HybridSet:
        return HybridSet(self._roots, index, limits)
