"""The decoder: one function, whether computed whole, in chunks or token by token."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from learner.kv import KVCache  # noqa: E402
from learner.model import Decoder, DecoderConfig  # noqa: E402

CONFIGS = {
    "demo": DecoderConfig(vocab_size=100, eos_token_id=1),
    "grouped": DecoderConfig(vocab_size=100, eos_token_id=1, heads=6, kv_heads=2, tied=True, qkv_bias=True),
}


def make_cache(config: DecoderConfig, num_rows: int) -> KVCache:
    return KVCache(
        layers=config.layers,
        num_rows=num_rows,
        kv_heads=config.kv_heads,
        max_len=config.max_len,
        head_dim=config.head_dim,
        dtype=torch.float32,
    )


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_chunks_and_decode_equal_the_whole_forward(name: str) -> None:
    config = CONFIGS[name]
    decoder, token_ids, cache = Decoder(config, seed=1), random_ids(4, 30), make_cache(config, 6)
    with torch.inference_mode():
        expected = decoder(token_ids)
        decoder.prefill(token_ids[:, :7], cache, 0)
        decoder.prefill(token_ids[:, 7:11], cache, 0, start=7)
        for length in range(11, 30):
            actual = decoder.decode(token_ids[:, length], cache, torch.full((4,), length), length)
            torch.testing.assert_close(actual, expected[:, length], atol=1e-4, rtol=1e-4)


def test_rows_of_different_lengths_decode_together() -> None:
    config = CONFIGS["grouped"]
    decoder, token_ids, cache = Decoder(config, seed=1), random_ids(3, 20), make_cache(config, 3)
    lengths = torch.tensor([5, 19, 0])
    with torch.inference_mode():
        expected = decoder(token_ids)
        decoder.prefill(token_ids[:, :19], cache, 0)
        chosen = token_ids.gather(1, lengths[:, None])[:, 0]
        actual = decoder.decode(chosen, cache, lengths, 19)
    rows = torch.arange(3)
    torch.testing.assert_close(actual, expected[rows, lengths], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_on_either_side_changes_nothing(name: str) -> None:
    decoder, token_ids = Decoder(CONFIGS[name], seed=1), random_ids(3, 12)
    padding = torch.zeros(3, 4, dtype=torch.long)
    real = torch.ones(3, 12, dtype=torch.bool)
    with torch.inference_mode():
        expected = decoder(token_ids)
        left = decoder(torch.cat((padding, token_ids), 1), attention_mask=torch.cat((padding.bool(), real), 1))
        right = decoder(torch.cat((token_ids, padding), 1))
    torch.testing.assert_close(left[:, 4:], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(right[:, :12], expected, atol=1e-4, rtol=1e-4)


def test_left_padding_gives_finite_gradients() -> None:
    decoder, token_ids = Decoder(CONFIGS["demo"], seed=1), random_ids(2, 8)
    mask = torch.tensor([[False] * 3 + [True] * 5, [True] * 8])
    decoder.logits(decoder(token_ids, attention_mask=mask))[mask].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in decoder.parameters())


def test_the_same_seed_gives_the_same_weights() -> None:
    one, same, other = (Decoder(CONFIGS["demo"], seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head_weight, other.head_weight)


def test_the_demo_model_is_as_small_as_promised_and_tied_weights_count_once() -> None:
    assert 300_000 < sum(parameter.numel() for parameter in Decoder(CONFIGS["demo"]).parameters()) < 400_000
    names = [name for name, _ in Decoder(CONFIGS["grouped"]).named_parameters()]
    assert "head.weight" not in names
    assert names[0] == "embedding.weight"


@pytest.mark.parametrize(
    ("field", "value"), [("kv_heads", 2), ("heads", 0), ("head_dim", 7), ("eos_token_id", 100), ("max_len", 0)]
)
def test_sizes_that_contradict_each_other_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=field):
        DecoderConfig(**{"vocab_size": 100, "eos_token_id": 1, field: value})
