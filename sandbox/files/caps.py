"""How much may cross the boundary in one tree.

Invariant: after `within`, both numbers are set and not negative.
"""

from __future__ import annotations

from typing import NamedTuple

from sandbox.errors import ConfigError
from sandbox.types import Limits


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
            ConfigError: one is negative.
        """
        for field, value in self._asdict().items():
            if value is not None and value < 0:
                raise ConfigError(field, value, "must not be negative")
        return FullCaps(
            limits.disk_bytes if self.max_bytes is None else self.max_bytes,
            limits.inodes if self.max_entries is None else self.max_entries,
        )
