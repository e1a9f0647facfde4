"""Rewards of one group to advantages: the only implementation, for the engine and every adapter.

Invariant: statistics are over valid trajectories alone; a masked trajectory, and a group that
holds fewer than two valid ones, gets 0. Results are always finite.

Shapes: G is the group's size.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Estimator: TypeAlias = Literal["grpo", "grpo_no_std", "rloo"]

STD_EPSILON = 1e-6
"""Added to the standard deviation, as verl's `compute_grpo_outcome_advantage` does."""


def advantages(
    rewards_G: npt.ArrayLike, valid_G: npt.ArrayLike, estimator: Estimator = "grpo_no_std"
) -> npt.NDArray[np.float32]:
    """Advantages of one group, float32 of shape [G].

    - `grpo`: (r - mean) / (std + 1e-6), std with n - 1 (DeepSeekMath, arXiv 2402.03300, section 4.1).
    - `grpo_no_std`: r - mean (Dr. GRPO, arXiv 2503.20783).
    - `rloo`: r - mean of the others (arXiv 2402.14740), which is n / (n - 1) times the one before.

    Args:
        rewards_G: rewards; entries of masked trajectories are ignored, NaN included.
        valid_G: False where a reward is unknown (a fault of ours).
        estimator: which of the above.

    Example: `advantages([1, 1, 0, 0], [True, False, True, True])` is `[2/3, 0, -1/3, -1/3]`.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    valid = np.asarray(valid_G, dtype=bool)
    assert rewards.ndim == 1, rewards.shape
    assert rewards.shape == valid.shape, (rewards.shape, valid.shape)
    result = np.zeros(rewards.shape, dtype=np.float32)
    num_valid = int(valid.sum())
    if num_valid < 2:
        return result
    centred = rewards[valid] - rewards[valid].mean()
    if estimator == "grpo":
        centred = centred / (centred.std(ddof=1) + STD_EPSILON) if np.any(centred) else centred
    elif estimator == "rloo":
        centred = centred * (num_valid / (num_valid - 1))
    result[valid] = centred
    return result
