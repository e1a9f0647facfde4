"""Jails of which something cannot be killed.

Owns: the list. Invariant: what is in here is never given out, and keeps its place among the pool's jails: its processes
still take memory, and the host does not use its number, uid and control groups again.
"""

from __future__ import annotations

import logging

from sandbox.jail import Jail, JailKey

_LOG = logging.getLogger("sandbox.pool")


class Quarantine:
    """Jails that are waited for by nobody."""

    def __init__(self) -> None:
        self._jails: list[Jail] = []

    def __len__(self) -> int:
        return len(self._jails)

    def add(self, key: JailKey, jail: Jail) -> None:
        """Something of this jail stays until the host ends."""
        self._jails.append(jail)
        _LOG.warning("a %s jail of image %s cannot be ended: quarantined (%d now)", key.jail, key.image, len(self))
