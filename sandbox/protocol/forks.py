"""What a forked child of the engine's process must not do: hold, end or speak for its parent's sandboxes.

Trainers fork without exec (data loaders, `multiprocessing` with `fork`), and such a child inherits every descriptor, a
copy of every object, and the epoll of the event loop, which it shares with its parent. Invariant: once the hook has
run, the numbers of the host's descriptors lead to /dev/null in the child. So nothing there keeps a socket, a lock or a
pipe open when the parent dies; what is closed later closes nothing of somebody else's; and what is taken out of the
shared epoll is not found there. The objects are marked, so that nothing which the child finalizes touches a control
group, a record or a process of its parent. (A fork that runs no Python hooks is noticed by the warden, which watches
the engine's process as well as its socket.)

What no library can undo: a child that goes on with the event loop of its parent (an exception that leaves the loop is
enough) changes the shared epoll under it. Children leave by `os._exit`, as those of `multiprocessing` do.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Owner(Protocol):
    """Who has descriptors that no child may keep."""

    def disown(self) -> list[int]:
        """In a forked child: stop doing anything, and name the descriptors. Must not block, wait or use the loop."""


def disown_in_children(owner: Owner) -> None:
    """From now on a child of `os.fork` disowns it at once.

    `owner` is held weakly; one small function for each call stays with the interpreter, which cannot forget it.
    """
    reference = weakref.ref(owner)

    def in_child() -> None:
        known = reference()
        if known is not None:
            lead_nowhere(known.disown())

    os.register_at_fork(after_in_child=in_child)


def lead_nowhere(fds: list[int]) -> None:
    """Makes every descriptor one of /dev/null; raises OSError where there is no number left to open that."""
    if not fds:
        return
    nowhere = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in fds:
            os.dup2(nowhere, fd, inheritable=False)
    finally:
        os.close(nowhere)
