"""The place in the cgroup v2 tree below which this process may make cgroups, and the controllers it has there.

Owns: the one change that an engine makes to a cgroup that is not its own. Version 2 lets a cgroup hand controllers
down only while no process is in it (the host's root apart), so whoever is in there, this process and its shell
included, is moved to a leaf `rollout-processes` beside the engines' cgroups, and stays there. Invariant: `find`
changes nothing, and `claim` nothing but that.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec

from sandbox.cgroup import files
from sandbox.cgroup.hierarchies import Hierarchies

CONTROLLERS = ("memory", "pids", "cpu")
LEAF = "rollout-processes"
_ROUNDS = 20
"""Looks at a cgroup whose processes fork while they are moved."""


class Delegation(msgspec.Struct, frozen=True):
    """A cgroup that this process may divide."""

    parent: str
    controllers: tuple[str, ...]
    """Those of `CONTROLLERS` that it has to hand down, at least one."""
    is_host_root: bool
    """The root of the whole tree: it may hold processes beside its children."""

    @property
    def absent(self) -> tuple[str, ...]:
        """Controllers that it lacks."""
        return tuple(name for name in CONTROLLERS if name not in self.controllers)


def find(places: Hierarchies) -> Delegation | str:
    """The cgroup to divide, or why there is none: root takes the host's root, others (containers too) their own."""
    if places.v2_mount is None:
        return "no cgroup v2 tree"
    if not os.access(f"{places.v2_mount}/cgroup.controllers", os.R_OK):  # something else is mounted over it
        return f"the cgroup v2 tree at {places.v2_mount} cannot be read"
    at_host_root = not os.path.exists(f"{places.v2_mount}/cgroup.type")
    if os.geteuid() == 0 and at_host_root:
        parent = places.v2_mount
    elif places.v2 is None:
        return f"the cgroup of this process lies outside {places.v2_mount}"
    else:
        parent = os.path.dirname(places.v2) if os.path.basename(places.v2) == LEAF else places.v2
    closed = [
        name for name in ("", "/cgroup.procs", "/cgroup.subtree_control") if not os.access(parent + name, os.W_OK)
    ]
    if closed:
        return f"{parent}{closed[0]} is not delegated to this user" if os.geteuid() else f"{parent} is read-only"
    offered = Path(parent, "cgroup.controllers").read_text().split()
    controllers = tuple(name for name in CONTROLLERS if name in offered)
    if not controllers:
        return f"{parent} has no controller of {', '.join(CONTROLLERS)}"
    return Delegation(parent, controllers, at_host_root and parent == places.v2_mount)


class Claim(msgspec.Struct, frozen=True):
    """What `claim` achieved."""

    controllers: tuple[str, ...]
    """Handed down to every child of the parent from now on."""
    num_moved: int
    """Processes that were moved to the leaf."""


def claim(delegation: Delegation) -> Claim:
    """Makes the parent hand its controllers down, after moving its processes to a leaf where that is needed.

    Raises:
        OSError: the leaf cannot be made or entered, processes come faster than they can be moved, or the kernel
            refuses every controller.
    """
    control = f"{delegation.parent}/cgroup.subtree_control"
    enabled = files.read(control).split()
    wanted = [name for name in delegation.controllers if name not in enabled]
    num_moved = 0
    refused: OSError | None = None
    for name in wanted:
        for _ in range(_ROUNDS):
            if not delegation.is_host_root:
                num_moved += _clear(delegation.parent)
            try:
                files.write(control, f"+{name}")
                enabled.append(name)
                break
            except OSError as error:
                refused = OSError(error.errno, f"{error.strerror} (enabling {name})", control)
                if error.errno != errno.EBUSY or delegation.is_host_root:
                    break  # the kernel's last word, such as EINVAL for cpu beside real-time processes
    controllers = tuple(name for name in delegation.controllers if name in enabled)
    if not controllers and refused is not None:
        raise refused
    return Claim(controllers, num_moved)


def _clear(parent: str) -> int:
    """Moves every process of the cgroup to its leaf; returns how many."""
    count = 0
    pids = files.read(f"{parent}/cgroup.procs").split()
    if pids and not os.path.isdir(f"{parent}/{LEAF}"):
        os.mkdir(f"{parent}/{LEAF}")
    for pid in pids:
        try:
            files.write(f"{parent}/{LEAF}/cgroup.procs", pid)
            count += 1
        except ProcessLookupError:
            continue  # it ended meanwhile
    return count
