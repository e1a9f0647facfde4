"""Chunked log-probabilities equal the full table's, and padding changes nothing."""

from __future__ import annotations

import pytest
import torch
from step_helpers import step_batch

from learner.logprobs import linear_logprobs
from learner.microbatch import micro_batches, score
from learner.model import Decoder, DecoderConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
def test_chunks_equal_the_full_softmax_forwards_and_backwards(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(50, 16, generator=generator)
    weight = torch.randn(101, 16, generator=generator)
    target = torch.randint(101, (50,), generator=generator)
    temperature = torch.rand(50, generator=generator) + 0.5
    upstream = torch.randn(50, generator=generator)

    full_hidden, full_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    table = ((full_hidden @ full_weight.T) / temperature[:, None]).log_softmax(1)
    expected = table.gather(1, target[:, None])[:, 0]
    (expected * upstream).sum().backward()

    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropies = linear_logprobs(hidden, weight, target, temperature, chunk_tokens=chunk_tokens)
    (logprobs * upstream).sum().backward()

    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert torch.allclose(entropies, -(table.exp() * table).sum(1), atol=1e-5)
    assert torch.allclose(hidden.grad, full_hidden.grad, atol=1e-5)
    assert torch.allclose(weight.grad, full_weight.grad, atol=1e-4)


@pytest.mark.parametrize("token_budget", [1, 40, 10_000])
def test_a_sequence_scores_the_same_alone_and_in_company(token_budget: int) -> None:
    model = Decoder(DecoderConfig(vocab_size=40, eos_token_id=0, dim=32, layers=2, heads=2, max_len=64), seed=3)
    batch = step_batch([5, 21, 13, 13, 2], vocab_size=40)
    alone = torch.zeros(len(batch.token_ids))
    for sequence in range(batch.num_sequences):
        for micro in micro_batches(batch, [sequence], 1):
            alone[micro.token_index] = score(model, batch, micro, device=CPU, chunk_tokens=1024)[0].detach()
    together = torch.zeros(len(batch.token_ids))
    covered = []
    for micro in micro_batches(batch, range(batch.num_sequences), token_budget):
        assert len(micro.token_ids) == 1 or micro.token_ids.numel() <= token_budget
        covered += micro.token_index.tolist()
        together[micro.token_index] = score(model, batch, micro, device=CPU, chunk_tokens=3)[0].detach()
    assert sorted(covered) == batch.mask.nonzero()[:, 0].tolist()
    assert torch.allclose(alone, together, atol=1e-5)
    assert (alone[batch.mask] < 0).all()
