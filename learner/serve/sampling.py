"""Draws the next token of every running sequence at once.

Invariant: a row's token depends only on its own logits, parameters and uniform number, so that a
request with a seed is reproducible in any company; the logprob is that of the distribution which
was really sampled from (after temperature, top-k and top-p), in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.serve.generation import GREEDY_BELOW, Generation


def sample(logits: Tensor, generations: Sequence[Generation]) -> tuple[list[int], list[float]]:
    """Samples one token per row by inversion of the cumulative distribution.

    Args:
        logits: [R, V] raw logits of R running generations, in their order.

    Returns:
        The tokens, and their logprobs in nats (NaN where the logits were not finite).
    """
    greedy = [generation.temperature < GREEDY_BELOW for generation in generations]
    divisors = [1.0 if cold else g.temperature for cold, g in zip(greedy, generations, strict=True)]
    scaled = logits.float() / torch.tensor(divisors)[:, None]
    limited = [row for row, g in enumerate(generations) if g.top_k or g.top_p < 1]
    if limited:
        chosen = [generations[row] for row in limited]
        scaled[limited] = restrict(scaled[limited], [g.top_k for g in chosen], [g.top_p for g in chosen])
    logprobs = scaled.log_softmax(-1)
    if all(greedy):
        tokens = logprobs.argmax(-1)
    else:
        tokens = _invert(logprobs, [_draw(generation) for generation in generations])
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy), logprobs.argmax(-1), tokens)
    picked = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), picked.tolist()


def restrict(scaled: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Sets to -inf what lies outside a row's `top_k` largest (0: off), then outside its nucleus of mass `top_p`.

    The nucleus holds the fewest most likely tokens whose mass reaches `top_p`; always at least one.
    """
    ordered, order = scaled.sort(dim=-1, descending=True)
    vocab = scaled.shape[-1]
    ranks = torch.arange(vocab)
    kept = torch.tensor([k if k else vocab for k in top_k])[:, None]
    ordered = ordered.masked_fill(ranks >= kept, float("-inf"))
    probabilities = ordered.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    outside = mass_before >= torch.tensor(top_p)[:, None]
    outside[:, 0] = False
    ordered = ordered.masked_fill(outside, float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def _draw(generation: Generation) -> float:
    assert generation.draws is not None
    return generation.draws.random()


def _invert(logprobs: Tensor, uniforms: Sequence[float]) -> Tensor:
    """The token at which each row's cumulative probability passes its uniform number in [0, 1)."""
    cumulative = logprobs.exp().cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total, or rounding could pick a token of probability 0 behind the last one.
    below = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(torch.tensor(uniforms)[:, None] * total, below)
    found = torch.searchsorted(cumulative, target, right=True)
    return found[:, 0].clamp(max=logprobs.shape[-1] - 1)
