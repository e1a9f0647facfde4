"""How long to pause before a jail is built again after a failure, and when to give up.

Owns: nothing. Invariant: pure. Only faults of building are ever tried again, never a command.
"""

from __future__ import annotations

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """Pauses that double from failure to failure."""

    first_s: float
    most_s: float
    max_retries: int

    def pause_s(self, num_failures: int) -> float | None:
        """The pause after that many failures in a row (1 or more); None: give up."""
        if num_failures > self.max_retries:
            return None
        return min(self.most_s, self.first_s * 2.0 ** min(num_failures - 1, 60))
