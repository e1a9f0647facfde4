"""How a sandbox's number and control groups come back for the next one.

Owns: nothing. Invariant: a number comes back only when the warden says that every process is gone, and control groups
only when they are thawed and emptied as well; whatever fails here is kept until the engine's end, and never raised.
"""

from __future__ import annotations

import anyio

from sandbox.cgroup import files
from sandbox.cgroup.pool import SetPool
from sandbox.cgroup.types import CgroupSet
from sandbox.errors import SandboxDiedError
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import Item, Tag, text
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Limits

_RESIDUE_BYTES = 32 * MIB
_TIMEOUT_S = 20.0


async def take_back(
    warden: Warden,
    ident: int,
    limits: Limits,
    cgroups: CgroupSet,
    box: Sandbox | None,
    pool: SetPool | None,
    threads: anyio.CapacityLimiter,
) -> bool:
    """Ends a jail and everything in it; is its number free again?

    Args:
        box: None where it was never made.
        pool: gets the control groups for the next sandbox; without it (or room in it) they are removed.
        threads: for what blocks.
    """
    items: list[Item] = []
    if (kill_file := cgroups.kill_file()) is not None:
        items.append(text(Tag.KILL, kill_file))
    place = None if pool is None else pool.promise(limits)
    items += [text(Tag.REMOVE, path) for path in (cgroups.remove_paths() if place is None else place)]
    gone = usable = False
    try:
        with anyio.move_on_after(_TIMEOUT_S):
            gone = await warden.release(ident, items)
            if gone and place is not None:
                await _clean(cgroups, box, threads)
                usable = True
    except (SandboxDiedError, OSError):
        pass  # the warden's end, or no descriptors to clean with: the host's own end does it
    if pool is not None and place is not None:
        if usable:
            pool.put(limits, cgroups)
        else:
            pool.forgo()
    return gone


async def _clean(cgroups: CgroupSet, box: Sandbox | None, threads: anyio.CapacityLimiter) -> None:
    with files.vanishing():
        if box is not None:
            box.end_freeze()
        if cgroups.residue_bytes() > _RESIDUE_BYTES:
            await anyio.to_thread.run_sync(cgroups.empty, limiter=threads)
