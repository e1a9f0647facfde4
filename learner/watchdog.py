"""Ends this process as soon as its parent is gone, even in the middle of a computation.

Owns one daemon thread. Invariant: when the write end of the parent pipe closes, for whatever reason, the
process is gone within moments, without clean-up: checkpoints are whole at any instant and the kernel
takes back everything else.
"""

from __future__ import annotations

import os
import select
import threading

EXIT_ORPHANED = 3


def exit_with_parent(parent_fd: int) -> None:
    """Starts watching `parent_fd`, the read end of a pipe that only the parent can write to."""
    threading.Thread(target=_watch, args=(parent_fd,), name="parent-watchdog", daemon=True).start()


def _watch(parent_fd: int) -> None:
    waiting = select.poll()
    waiting.register(parent_fd, select.POLLIN)
    while True:
        waiting.poll()
        if not os.read(parent_fd, 4096):
            os._exit(EXIT_ORPHANED)
