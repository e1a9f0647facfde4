"""Settings of the learner: the model, both phases, the machine it runs on.

Invariant: plain data, read by the engine (which writes it resolved into the run directory) and by the
learner process; a value out of range is refused when the struct is made.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from rollout.config.bounds import MAX_COUNT, MAX_SEED, MAX_THREADS
from rollout.errors import ConfigError

LossType = Literal["dapo", "grpo", "dr_grpo"]


def _count(prefix: str, config: msgspec.Struct, field: str, low: int, high: int = MAX_COUNT) -> None:
    value = getattr(config, field)
    if not low <= value <= high:
        raise ConfigError(f"{prefix}.{field}", value, f"must lie between {low} and {high}")


def _between(prefix: str, config: msgspec.Struct, field: str, low: float, high: float) -> None:
    value = getattr(config, field)
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{prefix}.{field}", value, f"must lie in [{low:g}, {high:g}]")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is trained: a Hugging Face folder, or the built-in decoder of these sizes."""

    path: str | None = None
    """Folder with `config.json` and safetensors; None for the built-in decoder."""
    vocab_size: int = 0
    """Built-in: number of tokens; 0 until the renderer's vocabulary is known."""
    eos_token_id: int = 0
    """Built-in: the token that ends a generation."""
    dim: int = 96
    layers: int = 3
    heads: int = 3
    kv_heads: int = 0
    """0 means `heads`."""
    max_len: int = 160
    """Longest sequence in tokens, prompt and actions together."""
    seed: int = 0
    """Initialises the built-in decoder."""

    def __post_init__(self) -> None:
        for field in ("dim", "layers", "heads", "max_len"):
            _count("learner.model", self, field, 1)
        for field in ("vocab_size", "eos_token_id", "kv_heads"):
            _count("learner.model", self, field, 0)
        _count("learner.model", self, "seed", 0, MAX_SEED)
        if self.path is None:
            self._check_builtin()

    def _check_builtin(self) -> None:
        """The built-in decoder can be made of these sizes; a model folder brings its own."""
        if self.dim % self.heads:
            raise ConfigError("learner.model.heads", self.heads, f"must divide learner.model.dim = {self.dim}")
        if self.dim // self.heads % 2:
            remedy = f"leaves {self.dim // self.heads} dimensions a head (dim / heads), which must be an even number"
            raise ConfigError("learner.model.heads", self.heads, remedy)
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError("learner.model.kv_heads", self.kv_heads, f"must divide heads = {self.heads}")


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised training on demonstrations: mean cross-entropy over the tokens to imitate."""

    steps: int = 800
    """Optimizer steps; 0 starts with RL."""
    batch_size: int = 32
    """Demonstrations of one step."""
    lr: float = 3e-3
    """At the first step; falls linearly to 0 after the last."""

    def __post_init__(self) -> None:
        _count("learner.sft", self, "steps", 0)
        _count("learner.sft", self, "batch_size", 1)
        _between("learner.sft", self, "lr", 0.0, 1.0)


class RlConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy optimization on groups of trajectories."""

    steps: int = 100
    """Steps, each of one batch of groups and one publish."""
    lr: float = 3e-4
    """Constant."""
    loss_type: LossType = "dapo"
    """How tokens are averaged: `dapo` over all tokens of an optimizer step, `grpo` per trajectory and
    then over trajectories, `dr_grpo` by trajectories times a constant length."""
    clip_low: float = 0.2
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = 0.28
    """The ratio counts up to 1 + clip_high."""
    tis_cap: float = 2.0
    """Cap of the per-token importance weight exp(old - behaviour), which corrects sampling by another
    version or another kernel. 0 turns the weight off."""
    old_logprobs: Literal["behaviour", "recompute"] = "behaviour"
    """Denominator of the clipped ratio. `behaviour`: the sampler's own log-probabilities, and the
    importance weight is then 1. `recompute`: the learner's, from one more forward pass before the first
    optimizer step of a batch; the importance weight then carries the mismatch (decoupled form)."""
    minibatches: int = 2
    """Optimizer steps per batch, each on a share of whole trajectories."""
    constant_length_tokens: int = 0
    """`dr_grpo` only: the constant; 0 means the model's `max_len`."""

    def __post_init__(self) -> None:
        for field in ("steps", "constant_length_tokens"):
            _count("learner.rl", self, field, 0)
        _count("learner.rl", self, "minibatches", 1)
        _between("learner.rl", self, "lr", 0.0, 1.0)
        _between("learner.rl", self, "clip_low", 0.0, 1.0)
        _between("learner.rl", self, "clip_high", 0.0, 100.0)
        _between("learner.rl", self, "tis_cap", 0.0, 1e6)


class LearnerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the learner process needs."""

    model: ModelConfig = ModelConfig()
    sft: SftConfig = SftConfig()
    rl: RlConfig = RlConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where there is one."""
    token_budget: int = 8192
    """Tokens of one micro-batch, padding included; bounds the memory of a step."""
    logprob_chunk_tokens: int = 1024
    """Rows of logits that exist at once."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    """Of AdamW."""
    threads: int = 2
    """Threads of torch on the CPU."""
    seed: int = 0
    """Shuffles trajectories into mini-batches."""
    checkpoint_every: int = 10
    """RL steps between checkpoints; one more is saved after SFT and at the end."""
    checkpoint_every_sft: int = 200
    """SFT steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept."""
    publish_timeout_s: float = 120.0
    """For the policy server to use new weights."""

    def __post_init__(self) -> None:
        for field in ("token_budget", "logprob_chunk_tokens", "checkpoint_every", "checkpoint_every_sft", "keep"):
            _count("learner", self, field, 1)
        _count("learner", self, "threads", 1, MAX_THREADS)
        _count("learner", self, "seed", 0, MAX_SEED)
        _between("learner", self, "max_grad_norm", 0.0, 1e9)
        _between("learner", self, "weight_decay", 0.0, 1.0)
        if not 0 < self.publish_timeout_s <= 86_400:
            raise ConfigError("learner.publish_timeout_s", self.publish_timeout_s, "must lie in (0, 86400] seconds")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("learner.betas", self.betas, "each must lie in [0, 1)")
