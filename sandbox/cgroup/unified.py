"""Limits, killing and accounting by cgroup v2 alone.

Layout, for set n of an engine E: E/sN (all limits) and E/sN/cK (one leaf per command), for v2 wants processes in
leaves only; all agents live in E/agents, so that what is out of memory is a command and never an agent, also where a
workspace full of data leaves no room. Every command gets a fresh leaf: its peak, its out-of-memory kills and its
refused forks are its own.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Literal

from sandbox.cgroup import files, swap
from sandbox.cgroup.delegation import LEAF, Delegation, claim
from sandbox.cgroup.leaves import Leaves
from sandbox.cgroup.types import CgroupPlan, Live, Reading
from sandbox.types import Limits

AGENTS = "agents"
AGENTS_WEIGHT = 10_000
"""Of the processors, beside 100 of each sandbox: agents do little, and every command waits for one."""
PERIOD_US = 100_000
LIMIT_OF = {"memory": "memory", "cpu": "cpus", "pids": "pids"}
"""The limit that each controller enforces."""


class UnifiedSet:
    """The cgroups of one sandbox; see `sandbox.cgroup.types.CgroupSet` for the methods.

    Args:
        controllers: those that the engine's parent cgroup hands down.
        refusals_are_local: a refused fork is counted in the cgroup of whoever forked (before Linux 6.11), and not where
            the limit is.
    """

    def __init__(
        self, root: str, index: int, limits: Limits, controllers: Sequence[str], *, refusals_are_local: bool
    ) -> None:
        self._root = root
        self._top = f"{root}/s{index}"
        self._limits = limits
        self._controllers = controllers
        self._refusals_are_local = refusals_are_local
        self._leaves = Leaves(self._top, reuse=False)
        self._made = False
        self._num_tenants = 0
        self._cpu_before_us = 0

    def start_plan(self) -> CgroupPlan:
        if self._made:
            self._leaves.all_free()
            return CgroupPlan()
        self._made = True
        return CgroupPlan((self._top, self._leaves.first()), tuple(self._writes()))

    def _writes(self) -> list[tuple[str, str]]:
        limits, writes = self._limits, []
        memory = limits.memory_bytes + limits.disk_bytes
        if "memory" in self._controllers:
            writes += [(f"{self._top}/memory.max", str(memory))]
            if os.path.exists(f"{self._root}/memory.swap.max"):
                writes += [(f"{self._top}/memory.swap.max", "0")]
        if "pids" in self._controllers:
            writes += [(f"{self._top}/pids.max", str(limits.pids))]
        if "cpu" in self._controllers:
            writes += [(f"{self._top}/cpu.max", f"{int(limits.cpus * PERIOD_US)} {PERIOD_US}")]
        if inner := [f"+{name}" for name in self._controllers if name in ("memory", "pids")]:
            writes += [(f"{self._top}/cgroup.subtree_control", " ".join(inner))]
        return writes

    def kill_file(self) -> str | None:
        return f"{self._top}/cgroup.kill"

    def freezer(self) -> str | None:
        return self._top

    def is_empty(self) -> bool:
        return not files.populated(self._top)

    def is_full(self) -> bool:
        return "pids" in self._controllers and int(files.read(f"{self._top}/pids.current")) >= self._limits.pids

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

    @property
    def peak_is_the_leafs(self) -> bool:
        return True

    def peak_bytes(self, leaf: str | None) -> int | None:
        if leaf is None or "memory" not in self._controllers:
            return None
        try:
            return int(files.read(f"{leaf}/memory.peak"))
        except FileNotFoundError:
            if not os.path.isdir(leaf):
                raise  # the sandbox has ended
            return None  # before Linux 5.19

    def read(self, leaf: str | None) -> Reading:
        refused = 0
        if "pids" in self._controllers:
            counting = leaf if self._refusals_are_local else self._top
            refused = 0 if counting is None else files.keyed(f"{counting}/pids.events", "max")
        has_memory = "memory" in self._controllers
        return Reading(
            oom_kills=files.keyed(f"{leaf or self._top}/memory.events", "oom_kill") if has_memory else 0,
            pids_refused=refused,
            cpu_us=files.keyed(f"{leaf}/cpu.stat", "usage_usec") if leaf else None,
        )

    def begin(self) -> None:
        self._num_tenants += 1
        self._cpu_before_us = self._cpu_us()

    def _cpu_us(self) -> int:
        return files.keyed(f"{self._top}/cpu.stat", "usage_usec")

    def live(self) -> Live:
        # memory.peak starts anew only with the directory (before Linux 6.12), so a later tenant has none of its own.
        peak, memory, pids = f"{self._top}/memory.peak", "memory" in self._controllers, "pids" in self._controllers
        own_peak = memory and self._num_tenants == 1 and os.path.exists(peak)
        return Live(
            memory_bytes=int(files.read(f"{self._top}/memory.current")) if memory else None,
            peak_memory_bytes=int(files.read(peak)) if own_peak else None,
            cpu_us=self._cpu_us() - self._cpu_before_us,
            pids=int(files.read(f"{self._top}/pids.current")) if pids else None,
        )


class UnifiedBackend:
    """One parent cgroup per engine, with the controllers that there are handed down to its sandboxes."""

    name: Literal["v2"] = "v2"

    def __init__(self, delegation: Delegation, engine: str) -> None:
        self._delegation = delegation
        self.parent = delegation.parent
        self._root = f"{self.parent}/rollout-{engine}"
        self._controllers: tuple[str, ...] = ()
        self._refusals_are_local = True
        self.roots: tuple[str, ...] = (self._root,)
        self._agents = f"{self._root}/{AGENTS}"
        self.agents: tuple[str, ...] = (f"{self._agents}/cgroup.procs",)
        self.note = ""
        self._swap_escapes = False

    @property
    def enforced(self) -> Mapping[str, bool]:
        """See `sandbox.cgroup.types.Backend`; known once it is open."""
        held = {limit: name in self._controllers for name, limit in LIMIT_OF.items()} | {"disk": True}
        return held | {"memory": held["memory"] and not self._swap_escapes}

    @property
    def gap(self) -> str:
        """Why not every limit is enforced; empty where all are."""
        absent = [name for name in LIMIT_OF if name not in self._controllers]
        reasons = [f"{self.parent} has no controller {', '.join(absent)}"] if absent else []
        return "; ".join(reasons + [swap.WHY_UNCOUNTED] * self._swap_escapes)

    def open(self, memory_bytes: int, pids: int, agents_bytes: int) -> None:
        done = claim(self._delegation)
        if done.num_moved:
            self.note = f"{done.num_moved} processes of {self.parent} were moved to its leaf {LEAF}"
        os.mkdir(self._root)
        try:
            if not os.path.exists(f"{self._root}/cgroup.kill"):
                raise OSError(errno.EOPNOTSUPP, "the kernel has no cgroup.kill (Linux 5.14)", self._root)
            if "memory" in done.controllers:
                files.write(f"{self._root}/memory.max", str(memory_bytes))
            if "pids" in done.controllers:
                files.write(f"{self._root}/pids.max", str(pids))
            files.write(f"{self._root}/cgroup.subtree_control", " ".join(f"+{name}" for name in done.controllers))
            os.mkdir(self._agents)
            if "memory" in done.controllers:
                files.write(f"{self._agents}/memory.max", str(agents_bytes))
            if "cpu" in done.controllers:
                files.write(f"{self._agents}/cpu.weight", str(AGENTS_WEIGHT))
        except OSError:
            files.remove_tree(self._root)
            raise
        self._controllers = done.controllers
        uncounted = not os.path.exists(f"{self._root}/memory.swap.max")
        self._swap_escapes = "memory" in done.controllers and uncounted and swap.in_use()
        self._refusals_are_local = not os.path.exists(f"{self._root}/pids.events.local")

    def new_set(self, index: int, limits: Limits) -> UnifiedSet:
        return UnifiedSet(self._root, index, limits, self._controllers, refusals_are_local=self._refusals_are_local)
