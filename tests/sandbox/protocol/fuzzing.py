"""How much is fuzzed, and from which seed: a short run in the tests, `scripts/soak fuzz` in full.

`ROLLOUT_FUZZ_SEED` (a number) repeats a run or makes another; `ROLLOUT_FUZZ_SCALE` multiplies the frames.
"""

from __future__ import annotations

import os


def seed() -> int:
    """The seed of this run."""
    return int(os.environ.get("ROLLOUT_FUZZ_SEED", "1"))


def scaled(num_frames: int) -> int:
    """So many frames, times the scale of this run."""
    return num_frames * int(os.environ.get("ROLLOUT_FUZZ_SCALE", "1"))
