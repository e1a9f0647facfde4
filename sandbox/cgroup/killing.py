"""Killing all that lives in one command's leaf, also when the engine is short of descriptors for a moment.

Invariant: a cgroup that is gone counts as dead, for the warden removes only what is empty; any other failure is tried
again, and never taken for success.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

from sandbox.cgroup import files
from sandbox.cgroup.types import CgroupSet
from sandbox.errors import SandboxError

KILL_AGAIN_S = 0.05
"""Until the next try where the kernel refused one."""
EMPTY_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02


def try_kill(cgroups: CgroupSet, leaf: str) -> bool:
    """Kills every process in it, without waiting; False where that cannot be said to the kernel now."""
    try:
        cgroups.kill_leaf(leaf)
    except OSError as error:
        return files.gone(error)
    return True


async def kill_patiently(cgroups: CgroupSet, leaf: str) -> None:
    """The same, tried until it is said. The caller sets the deadline."""
    for _ in iter(lambda: try_kill(cgroups, leaf), True):
        await anyio.sleep(KILL_AGAIN_S)


async def kill_until_empty(cgroups: CgroupSet, leaf: str, ours: Callable[[], bool] = lambda: True) -> None:
    """Kills until nobody is left: an earlier kill may have come before a process joined.

    Args:
        ours: asked before each look; once false, the leaf is another tenant's, who was let in when all were dead.

    Raises:
        SandboxDiedError: the leaf is gone.
        SandboxError: something in it does not die within `EMPTY_TIMEOUT_S`, or it cannot be told.
    """
    deadline = time.monotonic() + EMPTY_TIMEOUT_S
    pause_s = _FIRST_PAUSE_S
    while ours():
        late = time.monotonic() > deadline
        try:
            cgroups.kill_leaf(leaf)
            if not files.populated(leaf):
                return
        except OSError as error:
            if late or files.gone(error):
                with files.vanishing():
                    raise
        if late:
            raise SandboxError(f"what a killed command started did not end within {EMPTY_TIMEOUT_S} s")
        await anyio.sleep(pause_s)
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
