"""The inference engine: what is sampled does not depend on company, and says what it was sampled from."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from learner.model import Decoder, DecoderConfig  # noqa: E402
from learner.serve.engine import InferenceEngine  # noqa: E402
from learner.serve.generation import Generation  # noqa: E402
from learner.serve.sampling import restrict  # noqa: E402

CONFIG = DecoderConfig(vocab_size=50, eos_token_id=1, dim=32, heads=4, kv_heads=2, layers=2, max_len=64)


@pytest.fixture
def decoder() -> Decoder:
    return Decoder(CONFIG, seed=5)


def make_engine(decoder: Decoder, **options: Any) -> InferenceEngine:
    return InferenceEngine(decoder, **{"max_batch": 16, "max_len": 64, **options})


def make_requests(num: int, **options: Any) -> list[Generation]:
    """Requests of different prompts and lengths, each with its own seed."""
    rng = random.Random(7)
    return [
        Generation(
            request_id=str(index),
            prompt=[rng.randrange(2, 50) for _ in range(rng.randrange(1, 30))],
            **{"max_tokens": rng.randrange(1, 30), "seed": index, "stop_ids": CONFIG.eos_token_ids, **options},
        )
        for index in range(num)
    ]


def run(engine: InferenceEngine, requests: list[Generation]) -> list[Generation]:
    """Submits all, steps to the end; returns the finished ones in the order in which they left."""
    for request in requests:
        engine.submit(request)
    left: list[Generation] = []
    while engine.has_work:
        left += engine.step()
    return left


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_samples_what_each_request_samples_alone(decoder: Decoder, temperature: float) -> None:
    together, alone = (make_requests(40, temperature=temperature) for _ in range(2))
    finished = run(make_engine(decoder), together)
    assert sorted(finished, key=id) == sorted(together, key=id)
    for request in alone:
        run(make_engine(decoder, max_batch=1), [request])
    assert [request.token_ids for request in together] == [request.token_ids for request in alone]
    assert [request.finish_reason for request in together] == [request.finish_reason for request in alone]
    assert {request.finish_reason for request in together} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8)]
)
def test_logprobs_are_those_of_a_whole_forward(decoder: Decoder, temperature: float, top_k: int, top_p: float) -> None:
    for request in run(make_engine(decoder), make_requests(20, temperature=temperature, top_k=top_k, top_p=top_p)):
        with torch.inference_mode():
            hidden = decoder(torch.tensor([request.prompt + request.token_ids]))[0, len(request.prompt) - 1 : -1]
            scaled = decoder.logits(hidden) / (temperature or 1.0)
            rows = len(request.token_ids)
            expected = restrict(scaled, [top_k] * rows, [top_p] * rows).log_softmax(-1)
        picked = expected.gather(1, torch.tensor(request.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(request.logprobs), picked, atol=1e-4, rtol=1e-4)


def test_equal_prompts_share_one_prefill_and_sample_apart(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    siblings = make_requests(8, max_tokens=20, stop_ids=frozenset())
    for sibling in siblings:
        sibling.prompt = list(range(2, 22))
        sibling.__post_init__()
    alone = Generation(request_id="alone", prompt=siblings[3].prompt, max_tokens=20, seed=3)
    engine.submit(siblings[0])
    engine.step()
    run(engine, siblings[1:])
    assert engine.stats.shared_prompt_tokens == 7 * 19
    assert len({tuple(sibling.token_ids) for sibling in siblings}) > 1
    run(make_engine(decoder), [alone])
    assert siblings[3].token_ids == alone.token_ids


def test_another_salt_or_changed_weights_share_nothing(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    first, salted, later = (
        Generation(request_id=salt, prompt=[3, 4, 5], max_tokens=20, cache_salt=salt) for salt in ("", "x", "")
    )
    for request in (first, salted):
        engine.submit(request)
        engine.step()
    engine.weights_changed(1)
    engine.submit(later)
    engine.step()
    assert engine.num_running == 3
    assert engine.stats.shared_prompt_tokens == 0


def test_new_weights_in_flight_change_later_tokens_and_the_spans_say_where(decoder: Decoder) -> None:
    engine = make_engine(decoder)
    request, untouched = (Generation(request_id="", prompt=[3, 4, 5], max_tokens=30, temperature=0.0) for _ in "ab")
    engine.submit(request)
    for _ in range(10):
        engine.step()
    decoder.init(99)
    engine.weights_changed(7)
    while engine.has_work:
        engine.step()
    assert request.spans == [(0, 0, 10), (7, 10, 30)]
    decoder.init(5)
    run(make_engine(decoder), [untouched])
    assert request.token_ids[:10] == untouched.token_ids[:10]
    assert request.token_ids != untouched.token_ids


def test_aborted_requests_keep_their_tokens_and_leave_the_others_alone(decoder: Decoder) -> None:
    engine, reference = make_engine(decoder, max_batch=4), make_requests(6, stop_ids=frozenset(), max_tokens=20)
    run(make_engine(decoder), reference)
    requests = make_requests(6, stop_ids=frozenset(), max_tokens=20)
    for request in requests:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    assert engine.abort(requests[1])  # running
    assert engine.abort(requests[5])  # waiting
    assert not engine.abort(requests[1])
    run(engine, [])
    assert requests[1].token_ids == reference[1].token_ids[:5]
    assert (requests[1].finish_reason, requests[5].finish_reason, requests[5].token_ids) == ("abort", "abort", [])
    for index in (0, 2, 3, 4):
        assert requests[index].token_ids == reference[index].token_ids


def test_lower_priority_numbers_go_first(decoder: Decoder) -> None:
    requests = [
        Generation(request_id=str(p), prompt=[3], max_tokens=1, priority=p, stop_ids=frozenset()) for p in (2, 0, 1)
    ]
    assert [request.priority for request in run(make_engine(decoder, max_batch=1), requests)] == [0, 1, 2]


def test_a_generation_ends_where_its_stop_token_or_its_budget_is(decoder: Decoder) -> None:
    (free,) = run(make_engine(decoder), [Generation(request_id="", prompt=[9], max_tokens=12, temperature=0.0)])
    assert (free.finish_reason, len(free.token_ids)) == ("length", 12)
    stop = free.token_ids[4]
    again = Generation(request_id="", prompt=[9], max_tokens=12, temperature=0.0, stop_ids=frozenset({stop}))
    run(make_engine(decoder), [again])
    assert again.finish_reason == "stop"
    assert again.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


def test_sampling_follows_the_distribution(decoder: Decoder) -> None:
    num = 4000
    requests = [
        Generation(request_id="", prompt=[9, 8], max_tokens=1, temperature=0.5, seed=seed) for seed in range(num)
    ]
    run(make_engine(decoder, max_batch=512), requests)
    with torch.inference_mode():
        expected = (decoder.logits(decoder(torch.tensor([[9, 8]]))[0, -1]) / 0.5).softmax(-1)
    counts = torch.bincount(torch.tensor([request.token_ids[0] for request in requests]), minlength=50)
    error = (counts / num - expected).abs()
    assert (error <= 4 * (expected * (1 - expected) / num).sqrt() + 1 / num).all()


def test_requests_without_a_seed_depend_on_the_seed_of_the_server(decoder: Decoder) -> None:
    def tokens(seed: int) -> list[list[int]]:
        engine = make_engine(decoder, seed=seed)
        return [r.token_ids for r in sorted(run(engine, make_requests(5, seed=None)), key=lambda r: int(r.request_id))]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_weights_that_are_not_finite_end_the_request_and_spoil_no_later_one(decoder: Decoder) -> None:
    engine = make_engine(decoder, max_batch=2)
    with torch.no_grad():
        decoder.embedding.weight.fill_(float("nan"))
    prompt = list(range(2, 30))
    spoilt = [Generation(request_id="", prompt=prompt[index:], max_tokens=4) for index in range(2)]
    for request in run(engine, spoilt):
        assert (request.finish_reason, request.token_ids) == ("error", [])
    decoder.init(5)
    engine.weights_changed(1)
    # Side by side, attention runs over the short row up to the length of the long one.
    long, short = (Generation(request_id="", prompt=tokens, max_tokens=6) for tokens in (prompt, [9]))
    engine.submit(long)
    engine.step()
    run(engine, [short])
    assert [len(request.token_ids) for request in (long, short)] == [6, 6]
