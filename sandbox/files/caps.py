"""How much may cross the boundary in one tree.

Invariant: after `within`, both numbers are set and not negative.
"""

from __future__ import annotations

from typing import NamedTuple

from sandbox.checking import check_count
from sandbox.types import Limits

MAX_BYTES = 1 << 50
"""Above every file and tree that may be asked for."""


class FullCaps(NamedTuple):
    """The two numbers."""

    max_bytes: int
    max_entries: int


class Caps(NamedTuple):
    """What a caller gave; None for what the sandbox's own limits allow anyway."""

    max_bytes: int | None
    max_entries: int | None

    def within(self, limits: Limits) -> FullCaps:
        """Both numbers.

        Raises:
            ConfigError: one is no whole number, or negative.
        """
        for field, value in self._asdict().items():
            if value is not None:
                check_count(field, value, 0, MAX_BYTES)
        return FullCaps(
            limits.disk_bytes if self.max_bytes is None else self.max_bytes,
            limits.inodes if self.max_entries is None else self.max_entries,
        )
