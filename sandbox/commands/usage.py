"""A sandbox's live usage, put together from its cgroups and from what its agent counts.

Invariant: cgroups are believed first, since the kernel keeps them; the agent's numbers fill in what no cgroup tells.
"""

from __future__ import annotations

from sandbox.cgroup import files
from sandbox.cgroup.types import CgroupSet
from sandbox.protocol.wire import Space
from sandbox.types import SandboxUsage


def begin(cgroups: CgroupSet) -> None:
    """Counts from now on.

    Raises:
        SandboxDiedError: the cgroups vanished with the warden.
        SandboxError: they cannot be read now (no descriptors).
    """
    with files.vanishing():
        cgroups.begin()


def measure(cgroups: CgroupSet, space: Space | None, num_running: int) -> SandboxUsage:
    """What the sandbox holds now.

    Args:
        space: what the agent counts; None while it stands still.

    Raises:
        SandboxDiedError: the cgroups vanished with the warden.
        SandboxError: they cannot be read now (no descriptors).
    """
    with files.vanishing():
        live = cgroups.live()
    return SandboxUsage(
        memory_bytes=live.memory_bytes,
        peak_memory_bytes=live.peak_memory_bytes,
        cpu_s=None if live.cpu_us is None else live.cpu_us / 1e6,
        pids=space.num_processes if live.pids is None and space is not None else live.pids,
        disk_bytes=None if space is None else space.used_bytes,
        inodes=None if space is None else space.used_inodes,
        num_running=num_running,
    )
