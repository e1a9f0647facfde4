"""Reads a live sandbox's workspace: a stream that the warden's child writes, taken piece by piece.

Owns: the pipe. Invariant: nothing inside is asked, so a sandbox that stands still can be read; the child is dead when
this returns, or raises.
"""

from __future__ import annotations

import fcntl
from contextlib import suppress

import anyio
import anyio.to_thread

from sandbox.commands.live import ReadingEnd
from sandbox.errors import LayerError
from sandbox.files.caps import FullCaps
from sandbox.files.pipes import time_for
from sandbox.files.transfer import open_pipe
from sandbox.jail import Jail, uid_items
from sandbox.layers.intake import Intake
from sandbox.layers.nodes import Delta
from sandbox.layers.writing import TreeWriter
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import caps_item

_PIPE_BYTES = 1 << 20
_BATCH_BYTES = 1 << 20


async def read_workspace(
    warden: Warden, jail: Jail, caps: FullCaps, writer: TreeWriter | None, limiter: anyio.CapacityLimiter
) -> Delta:
    """What the workspace of that jail's lease holds over its bases.

    Args:
        writer: makes a tree of it; None where only the delta is wanted.
        limiter: of the threads that hash and write.

    Raises:
        LayerError: it is too large, has names that are too long, was changed while it was read, or the store is full.
        SandboxDiedError: the warden has ended.
    """
    theirs, ours = open_pipe(writing=False)
    with suppress(PermissionError):  # an unprivileged user's pipes may be used up
        fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    source = ReadingEnd(ours)
    intake = Intake(caps, writer)
    items = [*uid_items(jail.identity), caps_item(*caps)]
    timeout_s = time_for(caps.max_bytes)
    try:
        with anyio.fail_after(timeout_s):
            async with warden.reading(jail.number, items, theirs):
                try:
                    while piece := await _read_much(source):
                        await anyio.to_thread.run_sync(intake.feed, piece, limiter=limiter)
                finally:
                    source.close()
            return intake.result()
    except TimeoutError:
        raise LayerError(f"the workspace was not read within {timeout_s:.0f} s") from None
    finally:
        source.close()


async def _read_much(source: ReadingEnd) -> bytes:
    """What is there, up to a megabyte: each hand-over to a thread costs more than a small piece."""
    parts = [await source.read()]
    size = len(parts[0])
    with suppress(BlockingIOError):
        while parts[-1] and size < _BATCH_BYTES:
            parts.append(source.read_now())
            size += len(parts[-1])
    return b"".join(parts)
