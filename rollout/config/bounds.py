"""Bounds that settings of every section share.

Invariant: plain numbers; whatever lies within them fits the types that it ends up in.
"""

from __future__ import annotations

MAX_COUNT = 2**31 - 1
"""No count that makes sense is larger."""
MAX_SEED = 2**63 - 1
"""Seeds are signed 64-bit integers wherever they go."""
MAX_THREADS = 1_024
