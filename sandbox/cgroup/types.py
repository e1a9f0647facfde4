"""What a cgroup backend offers: plans for the warden, and readings.

Invariant: a backend only plans (which directories, which values, what to join) and reads; everything is made below
the engine's own parents, which the warden removes, so that nothing outlives the engine. Agents (and the tools that
build their jails) live together in one cgroup; a `CgroupSet` holds what one sandbox runs, for one lease at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

import msgspec

from sandbox.types import Limits

LIMIT_NAMES = ("memory", "cpus", "pids", "disk")
"""Names that `SandboxSpec.insist` and `Outcome.unenforced` use."""


class Reading(NamedTuple):
    """Counters of one sandbox; only differences between two readings mean anything."""

    oom_kills: int = 0
    pids_refused: int = 0
    cpu_us: int | None = None
    """CPU time of the command's own leaf; None where it has none."""


class Live(NamedTuple):
    """What a sandbox's commands hold and have used since `begin`; None where no file tells."""

    memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    cpu_us: int | None = None
    pids: int | None = None


class CgroupPlan(msgspec.Struct, frozen=True):
    """Directories to make, then values to write."""

    make: tuple[str, ...] = ()
    write: tuple[tuple[str, str], ...] = ()


class CgroupSet(Protocol):
    """The cgroups of one sandbox.

    A command's leaf is what `cgroup.kill` can empty without touching earlier commands' background children.
    """

    def start_plan(self) -> CgroupPlan:
        """What to make before the first command; empty for a set that was used before."""

    def kill_file(self) -> str | None:
        """Writing 1 here kills all that the sandbox runs; None where the host has no such file."""

    def freezer(self) -> str | None:
        """The v2 directory of all that it runs, with `cgroup.freeze` and `cgroup.events`; None where there is none."""

    def is_empty(self) -> bool:
        """Does nobody live in it? (True where it cannot be known.)"""

    def is_full(self) -> bool:
        """Is its process limit reached, so that no further command may begin?"""

    def remove_paths(self) -> tuple[str, ...]:
        """Directories to remove (with everything below) when the set is not kept."""

    def residue_bytes(self) -> int:
        """Memory still charged after the sandbox's end: page cache that it read first."""

    def empty(self) -> None:
        """Gives that memory back (blocking, milliseconds), so that the next tenant's peak is its own."""

    def take_leaf(self) -> str | None:
        """A free leaf for one command (its directory), or None without cgroups."""

    def return_leaf(self, leaf: str) -> None:
        """Gives a leaf back; one that still has processes is set aside until the sandbox ends."""

    def idle(self) -> bool:
        """Have earlier commands left no background process behind? (True where it cannot be known.)"""

    def join_files(self, leaf: str) -> tuple[str, ...]:
        """`cgroup.procs` files that a command's first process joins, in order."""

    def kill_leaf(self, leaf: str) -> None:
        """Kills every process in the leaf, without waiting."""

    def reset_peak(self) -> None:
        """Starts a new peak; only sensible while no other command runs."""

    @property
    def peak_is_the_leafs(self) -> bool:
        """Is a command's peak its own, whatever runs beside it?"""

    def peak_bytes(self, leaf: str | None) -> int | None:
        """Peak memory since the last reset (or of the leaf), or None."""

    def read(self, leaf: str | None) -> Reading:
        """The counters now."""

    def begin(self) -> None:
        """Said when the sandbox is up: what earlier tenants of the set used does not count."""

    def live(self) -> Live:
        """What the whole sandbox holds now."""


class Backend(Protocol):
    """One way to enforce limits on this host; owns one parent cgroup per engine."""

    @property
    def name(self) -> Literal["hybrid", "v2", "none"]:
        """As in `SandboxConfig.cgroup_backend`."""

    @property
    def enforced(self) -> Mapping[str, bool]:
        """For each of `LIMIT_NAMES`: can it be enforced?"""

    @property
    def roots(self) -> tuple[str, ...]:
        """The engine's parent cgroups, the one with `cgroup.kill` first; removed at its end."""

    @property
    def agents(self) -> tuple[str, ...]:
        """The `cgroup.procs` files that a jail's first process joins, in order."""

    @property
    def note(self) -> str:
        """What opening it changed beside its own cgroups; empty for nothing."""

    def open(self, memory_bytes: int, pids: int, agents_bytes: int) -> None:
        """Makes the parent cgroups with the caps for all sandboxes together, and the agents' with its share.

        Raises:
            OSError: the host refuses; nothing of it is left.
        """

    def new_set(self, index: int, limits: Limits) -> CgroupSet:
        """A set of that number, not yet made on disk."""
