"""What the policy server refuses, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from serving import make_request

from learner.model import DecoderConfig
from learner.serve.errors import RequestError
from learner.serve.protocol import parse_request

CONFIG = DecoderConfig(vocab_size=60, eos_token_id=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(token_ids=[]), ["token_ids", "at least one"]),
        (lambda body: body.update(token_ids=[3, 60]), ["token_ids[1]", "60", "[0, 60)"]),
        (lambda body: body.update(token_ids=[-1]), ["token_ids[0]", "-1", "[0, 60)"]),
        (lambda body: body.update(token_ids=[3] * 4096), ["token_ids", "4096", "--max-len"]),
        (lambda body: body.update(token_ids="hello"), ["token_ids"]),
        (lambda body: body.update(stream=True), ["stream"]),
        (lambda body: body.update(model="another"), ["model", "another", "decoder"]),
        (lambda body: body.update(messages=[]), ["messages"]),
        (lambda body: body.pop("sampling_params"), ["sampling_params"]),
        (lambda body: body["sampling_params"].update(max_tokens=0), ["max_tokens", "0", "at least 1"]),
        (lambda body: body["sampling_params"].update(temperature=-1.0), ["temperature", "-1.0"]),
        (lambda body: body["sampling_params"].update(top_p=0.0), ["top_p", "0.0", "(0, 1]"]),
        (lambda body: body["sampling_params"].update(top_k=-2), ["top_k", "-2"]),
        (lambda body: body["sampling_params"].update(stop_token_ids=[99]), ["stop_token_ids", "99"]),
        (lambda body: body["sampling_params"].update(logprobs=5), ["logprobs", "5"]),
        (lambda body: body["sampling_params"].update(n=4), ["sampling_params.n", "4"]),
        (lambda body: body["sampling_params"].update(min_p=0.1), ["min_p", "0.1", "not supported"]),
        (lambda body: body["sampling_params"].update(beam_width=3), ["beam_width"]),
    ],
)
def test_a_bad_request_is_refused_with_field_value_and_remedy(
    change: Callable[[dict[str, Any]], object], words: list[str]
) -> None:
    body = make_request([3, 4])
    change(body)
    with pytest.raises(RequestError) as caught:
        parse_request(msgspec.json.encode(body), CONFIG, max_len=4096, model_name="decoder")
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_continuation_is_cut_to_the_room_that_the_context_leaves() -> None:
    body = make_request([3] * 4000, max_tokens=500)
    _, generation = parse_request(msgspec.json.encode(body), CONFIG, max_len=4096, model_name="decoder")
    assert generation.max_tokens == 96
