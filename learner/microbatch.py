"""Cuts a step into padded micro-batches and scores them.

Invariant: every trained token of the given sequences is scored exactly once; a sequence's log-probabilities
do not depend on which others share its micro-batch (padding lies on the right of causal attention, where
no real token sees it).

Shapes: B sequences padded to L tokens, n trained tokens of the micro-batch, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from learner.logprobs import linear_logprobs
from learner.reader import StepBatch


class Policy(Protocol):
    """What training needs of a model."""

    @property
    def head_weight(self) -> Tensor:
        """[V, D] output projection."""
        ...

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[B, L] int64 tokens, padded on the right, to hidden states [B, L, D]."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that go through the model together."""

    token_ids: Tensor
    """[B, L] int64, padded on the right with 0."""
    token_index: Tensor
    """[n] int64: place in the step's flat columns of every token that is trained."""
    context_index: Tensor
    """[n] int64: place in the flattened [B * L] hidden states that predicts it, one to its left."""


def micro_batches(batch: StepBatch, sequences: Sequence[int], token_budget: int) -> Iterator[MicroBatch]:
    """Micro-batches over the given sequences, longest first, each at most `token_budget` with its padding.

    A longer sequence gets a micro-batch of its own; sequences without a trained token are left out.
    """
    lengths = batch.lengths.tolist()
    trained = torch.zeros(batch.num_sequences, dtype=torch.int64)
    trained.index_add_(0, batch.token_seq, batch.mask.long())
    order = sorted((one for one in sequences if trained[one]), key=lambda one: -lengths[one])
    while order:
        longest = lengths[order[0]]
        count = max(1, token_budget // longest)
        yield _padded(batch, order[:count], longest)
        order = order[count:]


def _padded(batch: StepBatch, sequences: list[int], longest: int) -> MicroBatch:
    token_ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    places, contexts = [], []
    for row, sequence in enumerate(sequences):
        start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
        token_ids[row, : end - start] = batch.token_ids[start:end]
        trained = batch.mask[start:end].nonzero()[:, 0]
        places.append(trained + start)
        contexts.append(trained + (row * longest - 1))
    return MicroBatch(token_ids, torch.cat(places), torch.cat(contexts))


def score(
    model: Policy, batch: StepBatch, micro: MicroBatch, *, device: torch.device, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n] of the trained tokens under the model, differentiable, and entropies [n].

    Both after the temperature of each token's trajectory, on `device`, float32.
    """
    hidden = model(micro.token_ids.to(device)).flatten(0, 1)
    trajectory = batch.seq_traj[batch.token_seq[micro.token_index]]
    return linear_logprobs(
        hidden[micro.context_index.to(device)],
        model.head_weight,
        batch.token_ids[micro.token_index].to(device),
        batch.temperature[trajectory].to(device),
        chunk_tokens=chunk_tokens,
    )
