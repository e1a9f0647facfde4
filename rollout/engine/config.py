"""Settings of the engine: budgets, windows, and how much failure is bearable."""

from __future__ import annotations

import math

import msgspec

from rollout.advantage import Estimator
from rollout.config.bounds import MAX_COUNT, MAX_SEED
from rollout.errors import ConfigError

MAX_STALENESS = 1_024


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How episodes, groups and runs are conducted."""

    group_size: int = 8
    """Episodes of one task."""
    groups_per_batch: int = 24
    """Groups that one optimizer step consumes."""
    max_staleness: int = 0
    """Weight versions that a group may lag behind the step that consumes it; with
    `groups_per_batch` it bounds the groups admitted and not yet consumed."""
    max_episodes: int = 512
    """Episodes alive at once, over all groups."""
    temperature: float = 1.0
    max_tokens: int = 512
    """Most tokens of one action."""
    max_context_tokens: int = 8_192
    """Most tokens of one episode, prompt and observations included."""
    max_episode_s: float = 600.0
    """Wall time of one episode before verification; a task's own limit may be shorter."""
    request_timeout_s: float = 300.0
    """One request to the policy server, retries included."""
    verify_timeout_s: float = 900.0
    """One verdict, waiting and retries included; beyond it the verifier has failed."""
    max_sample_retries: int = 2
    """New attempts of one sample after a fault, before it is masked."""
    retry_backoff_s: float = 0.2
    """Before the first new attempt; doubles with each."""
    max_fault_fraction: float = 0.25
    """The run stops when more than this fraction of all attempts ended in a fault."""
    min_fault_attempts: int = 16
    """No run stops before this many attempts have ended."""
    max_dropped_in_a_row: int = 64
    """A training run stops after this many dropped groups without a complete one between them: no
    optimizer step will ever come of it."""
    estimator: Estimator = "grpo_no_std"
    seed: int | None = 0
    """Seeds every request by group, sibling and turn; None leaves sampling to the server."""

    def __post_init__(self) -> None:
        for field, low, high in (
            ("group_size", 1, MAX_COUNT),
            ("groups_per_batch", 1, MAX_COUNT),
            ("max_staleness", 0, MAX_STALENESS),
            ("max_episodes", 1, MAX_COUNT),
            ("max_tokens", 1, MAX_COUNT),
            ("max_context_tokens", 2, MAX_COUNT),
            ("max_sample_retries", 0, MAX_COUNT),
            ("min_fault_attempts", 1, MAX_COUNT),
            ("max_dropped_in_a_row", 1, MAX_COUNT),
        ):
            if not low <= getattr(self, field) <= high:
                raise ConfigError(f"engine.{field}", getattr(self, field), f"must lie between {low} and {high}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ConfigError("engine.seed", self.seed, f"must lie between 0 and {MAX_SEED}")
        for field in ("max_episode_s", "request_timeout_s", "verify_timeout_s", "retry_backoff_s"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"engine.{field}", value, "must be a positive number of seconds")
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise ConfigError("engine.temperature", self.temperature, "must lie between 0 and 100")
        if not 0 <= self.max_fault_fraction <= 1:
            raise ConfigError("engine.max_fault_fraction", self.max_fault_fraction, "must lie between 0 and 1")

    @property
    def window_groups(self) -> int:
        """Groups admitted and not yet consumed: (max_staleness + 1) x groups_per_batch."""
        return (self.max_staleness + 1) * self.groups_per_batch
