"""The losses, on streamed per-token log-probabilities: one loss per call, whatever model made them.

Owns the formulas. Invariant: denominators are those of the whole optimizer step and are fixed before its
first micro-batch, so the sum of the micro-batch losses is the loss of the step however it was cut; and
what lies under a False mask, NaN included, reaches neither the loss nor a gradient.

Shapes: n tokens of one micro-batch, flat. Nats throughout. Sources: PPO clip (Schulman 2017), GRPO
(DeepSeekMath 2024), DAPO (2025, token mean, clip-higher), Dr. GRPO (2025, constant length), truncated
importance sampling (Yao et al. 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "trajectory_mean", "constant_length"]

AGGREGATIONS: dict[str, Aggregation] = {
    "dapo": "token_mean",
    "grpo": "trajectory_mean",
    "dr_grpo": "constant_length",
}
"""The names of whole recipes differ, in this module, only in how tokens are averaged."""


def token_weights(
    mask_n: Tensor, trajectory_n: Tensor, num_trajectories: int, aggregation: Aggregation, constant_length: float = 1.0
) -> Tensor:
    """Weight of every token of an optimizer step: a loss is then Σ weight · token loss.

    Args:
        mask_n: bool, tokens that are trained, over the whole step.
        trajectory_n: int64 trajectory of each token, in [0, num_trajectories).
        num_trajectories: trajectories of the step, those without a trained token included.
        aggregation: `token_mean` 1/Σmask; `trajectory_mean` 1/(trajectories · its tokens), where only
            trajectories with a trained token count; `constant_length` 1/(trajectories · constant).
        constant_length: for `constant_length`, tokens.

    Returns:
        float32 [n], 0 under a False mask; all 0 when nothing is trained.
    """
    mask = mask_n.float()
    if aggregation == "token_mean":
        return mask / mask.sum().clamp(min=1)
    tokens = torch.zeros(num_trajectories, device=mask.device).index_add_(0, trajectory_n, mask)
    num_live = (tokens > 0).sum().clamp(min=1)
    if aggregation == "constant_length":
        return mask / (num_live * constant_length)
    return mask / (num_live * tokens.clamp(min=1))[trajectory_n]


@dataclass(frozen=True, slots=True)
class PolicyLossConfig:
    """Constants of the clipped policy loss; see `RlConfig`."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float = 0.0


@dataclass(slots=True)
class PolicySums:
    """What metrics are made of: plain sums over trained tokens, to be added up over micro-batches."""

    num_tokens: float = 0.0
    clipped: float = 0.0
    """Tokens whose gradient the clip removed."""
    mismatch_kl: float = 0.0
    """Σ (w - 1 - log w), w = exp(logprob - behaviour): KL(behaviour ‖ policy), estimated without bias."""
    is_sum: float = 0.0
    is_square_sum: float = 0.0
    is_max: float = 0.0

    def add(self, other: PolicySums) -> None:
        """Adds another micro-batch."""
        largest = max(self.is_max, other.is_max)
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        self.is_max = largest

    def metrics(self) -> dict[str, float]:
        """Means per trained token; `is_ess` is the effective share of the sample, in (0, 1]."""
        num = max(self.num_tokens, 1.0)
        square = max(self.is_square_sum, 1e-30)
        return {
            "clipfrac": self.clipped / num,
            "mismatch_kl": self.mismatch_kl / num,
            "is_mean": self.is_sum / num,
            "is_max": self.is_max,
            "is_ess": self.is_sum**2 / (num * square) if self.num_tokens else 0.0,
        }


def policy_loss(
    config: PolicyLossConfig,
    logprobs_n: Tensor,
    old_n: Tensor,
    behaviour_n: Tensor,
    advantages_n: Tensor,
    mask_n: Tensor,
    weights_n: Tensor,
) -> tuple[Tensor, PolicySums]:
    """Clipped policy loss of one micro-batch: Σ weight · tis · max(-A r, -A clip(r)), r = exp(logprob - old).

    Args:
        config: clip range, and the cap C of tis = min(exp(old - behaviour), C); no weight where C is 0.
        logprobs_n: of the policy in training; the only input that gets a gradient.
        old_n: at the start of the optimizer step (or of the batch); behaviour where there is no better.
        behaviour_n: of the sampler, after temperature.
        advantages_n: of each token's trajectory.
        mask_n: bool, tokens that are trained.
        weights_n: from `token_weights` over the whole optimizer step.

    Returns:
        a scalar, finite and differentiable even when nothing is trained; sums for the metrics.
    """
    logprobs, old = _masked(logprobs_n, mask_n), _masked(old_n, mask_n)
    behaviour, advantages = _masked(behaviour_n, mask_n), _masked(advantages_n, mask_n)
    ratio = (logprobs - old).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    per_token = torch.maximum(plain, clipped)
    if config.tis_cap > 0:
        per_token = per_token * (old - behaviour).exp().clamp(max=config.tis_cap)
    loss = (per_token * weights_n).sum()
    with torch.no_grad():
        return loss, _sums(logprobs, behaviour, clipped > plain, mask_n)


def sft_loss(logprobs_n: Tensor, mask_n: Tensor, weights_n: Tensor) -> Tensor:
    """Cross-entropy of one micro-batch: Σ weight · -logprob. Arguments as `policy_loss`."""
    return -(_masked(logprobs_n, mask_n) * weights_n).sum()


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Replaces what is not trained before any arithmetic: 0 · NaN is NaN, in gradients too."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _sums(logprobs: Tensor, behaviour: Tensor, removed: Tensor, mask: Tensor) -> PolicySums:
    log_w = logprobs - behaviour
    w = log_w.exp()
    live = mask.float()
    return PolicySums(
        num_tokens=float(live.sum()),
        clipped=float((removed * live).sum()),
        mismatch_kl=float(((w - 1 - log_w) * live).sum()),
        is_sum=float((w * live).sum()),
        is_square_sum=float((w * w * live).sum()),
        is_max=float((w * live).max()) if len(w) else 0.0,
    )
