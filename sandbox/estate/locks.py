"""A lock on something of this host that an engine holds by an open file.

Invariant: it lasts until every copy of its descriptor is closed, those of the warden and of forks included.
"""

from __future__ import annotations

import os


class HeldLock:
    """Args: the descriptor that holds the lock; owned from now on."""

    def __init__(self, lock_fd: int) -> None:
        self.lock_fd = lock_fd

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [] if self.lock_fd < 0 else [self.lock_fd]

    def close(self) -> None:
        """Lets go of this copy of the lock; idempotent."""
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1
