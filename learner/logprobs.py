"""Log-probabilities of given tokens straight from hidden states, without the full table of logits.

Owns the output layer's arithmetic in training. Invariant: at most `chunk_tokens` rows of logits exist at
once, forwards and backwards; results equal the unchunked ones to float32 rounding.

Shapes: N rows (tokens to be scored), D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def linear_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, temperature_N: Tensor, *, chunk_tokens: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of softmax(hidden · weightᵀ / temperature) at `target`.

    Args:
        hidden_ND: hidden states before the output projection.
        weight_VD: the output projection.
        target_N: int64 token of each row.
        temperature_N: float32, > 0.
        chunk_tokens: rows of logits that exist at once.

    Returns:
        log-probabilities [N], differentiable in hidden and weight, and entropies [N], which are not;
        both float32, in nats.
    """
    logprobs: Tensor
    entropies: Tensor
    logprobs, entropies = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, target_N, temperature_N, chunk_tokens
    )
    return logprobs, entropies


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps the inputs and recomputes each chunk's logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(target), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for start in range(0, len(target), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            all_logprobs = _log_softmax(hidden[rows], weight, temperature[rows])
            logprobs[rows] = all_logprobs.gather(1, target[rows, None])[:, 0]
            entropies[rows] = -(all_logprobs.exp() * all_logprobs).sum(1)
        ctx.save_for_backward(hidden, weight, target, temperature)
        ctx.chunk_tokens = chunk_tokens
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_logprobs = grads[0]
        hidden, weight, target, temperature = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(target), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            scale = (grad_logprobs[rows] / temperature[rows])[:, None]
            grad_logits = _log_softmax(hidden[rows], weight, temperature[rows]).exp_().mul_(-scale)
            grad_logits.scatter_add_(1, target[rows, None], scale)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += (grad_logits.T @ hidden[rows]).float()
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float() / temperature[:, None]
    return logits.log_softmax(1)
