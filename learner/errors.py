"""What can end the learner.

Invariant: every one of these reaches the engine as one `LearnerError` message before the process exits;
nothing is retried here, because the engine restarts a learner from its checkpoint.
"""

from __future__ import annotations

from rollout.errors import RolloutError


class TrainingError(RolloutError):
    """Training cannot go on: a frame out of order, a loss that is not finite."""


class CheckpointError(RolloutError):
    """A checkpoint is damaged or belongs to another model."""
