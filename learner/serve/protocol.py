"""The wire format of `POST /inference/v1/generate`: vLLM's token-in, token-out schema.

Owns what a request may say. Invariant: a request that passes `parse_request` can be generated
exactly as asked; an option that this server does not honour is refused by name, never ignored.

The schema follows `vllm/entrypoints/serve/disagg/protocol.py`; `logprobs` are the processed ones
(after temperature, top-k and top-p), and at temperature 0 those of temperature 1.
"""

from __future__ import annotations

import math
import uuid

import msgspec

from learner.model import DecoderConfig
from learner.serve.errors import RequestError
from learner.serve.generation import Generation

MAX_STOP_TOKENS = 64
MAX_TEMPERATURE = 100.0
MIN_LOGPROB = -9999.0
"""Logprobs are clamped here, as JSON has no infinity."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's sampling parameters, as far as they are honoured (or may hold their neutral value)."""

    max_tokens: int | None = 16
    """None: until the context is full."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off."""
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none; 0 or 1: the sampled token's."""
    n: int = 1
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    prompt_logprobs: int | None = None
    detokenize: bool = False
    skip_special_tokens: bool = True


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt to continue."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""
    model: str | None = None
    stream: bool | None = False
    cache_salt: str | None = None
    priority: int = 0
    """Lower is served earlier."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """One sampled token; `token` is `token_id:<id>`."""

    token: str
    logprob: float


class Logprobs(msgspec.Struct, frozen=True):
    """One entry per sampled token."""

    content: list[TokenLogprob]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The continuation. The stop token, if any, is the last of `token_ids`."""

    index: int
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: str


class WeightSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens [start, end) of choice 0 came from this weight version."""

    version: int
    start: int
    end: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a `GenerateRequest`."""

    request_id: str
    model: str
    choices: list[Choice]
    usage: Usage
    weight_versions: list[WeightSpan]


_decode = msgspec.json.Decoder(GenerateRequest).decode


def parse_request(
    body: bytes, config: DecoderConfig, *, max_len: int, model_name: str
) -> tuple[GenerateRequest, Generation]:
    """Decodes and checks a request body for the model `model_name` with a context of `max_len` tokens.

    Raises:
        RequestError: names the field, its value and what would be accepted.
    """
    try:
        request = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError("body", body[:60], f"not a generate request: {error}") from error
    _check_prompt(request.token_ids, config.vocab_size, max_len)
    params = request.sampling_params
    _check_params(params, config.vocab_size)
    if request.model not in (None, model_name):
        raise RequestError("model", request.model, f"this server has {model_name!r} (or leave it out)")
    if request.stream:
        raise RequestError("stream", True, "answers are whole; leave it false")
    room = max_len - len(request.token_ids)
    stops = frozenset(params.stop_token_ids or ())
    generation = Generation(
        request_id=request.request_id or uuid.uuid4().hex,
        prompt=request.token_ids,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        seed=params.seed,
        stop_ids=stops if params.ignore_eos else stops | config.eos_token_ids,
        priority=request.priority,
        cache_salt=request.cache_salt or "",
    )
    return request, generation


def _check_prompt(token_ids: list[int], vocab_size: int, max_len: int) -> None:
    if not token_ids:
        raise RequestError("token_ids", [], "a prompt has at least one token")
    if len(token_ids) >= max_len:
        remedy = f"the prompt must be shorter than the context of {max_len} tokens (raise --max-len, or shorten it)"
        raise RequestError("len(token_ids)", len(token_ids), remedy)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        at, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise RequestError(f"token_ids[{at}]", bad, f"must lie in [0, {vocab_size}), the model's vocabulary")


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    stops = params.stop_token_ids or []
    bad_stop = next((token for token in stops if not 0 <= token < vocab_size), None)
    checks: list[tuple[str, object, bool, str]] = [
        ("max_tokens", params.max_tokens, params.max_tokens is None or params.max_tokens >= 1, "must be at least 1"),
        (
            "temperature",
            params.temperature,
            math.isfinite(params.temperature) and 0 <= params.temperature <= MAX_TEMPERATURE,
            f"must lie in [0, {MAX_TEMPERATURE:g}]; 0 is greedy",
        ),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "must lie in (0, 1]; 1 is off"),
        ("top_k", params.top_k, params.top_k >= -1, "must be at least 1, or 0 or -1 for off"),
        ("seed", params.seed, params.seed is None or -(2**63) <= params.seed < 2**64, "must fit 64 bits"),
        ("stop_token_ids", len(stops), len(stops) <= MAX_STOP_TOKENS, f"at most {MAX_STOP_TOKENS} of them"),
        ("stop_token_ids", bad_stop, bad_stop is None, f"must lie in [0, {vocab_size}), the model's vocabulary"),
        ("logprobs", params.logprobs, params.logprobs in (None, 0, 1), "only the sampled token's are given: 0 or 1"),
        ("n", params.n, params.n == 1, "send one request per sample; equal prompts share their prefill"),
        ("prompt_logprobs", params.prompt_logprobs, params.prompt_logprobs is None, "not supported; leave it out"),
    ]
    checks += [
        (name, getattr(params, name), getattr(params, name) == neutral, f"not supported; leave it at {neutral}")
        for name, neutral in _NEUTRAL.items()
    ]
    for name, value, good, remedy in checks:
        if not good:
            raise RequestError(f"sampling_params.{name}", value, remedy)


_NEUTRAL: dict[str, float] = {
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def encode_response(request: GenerateRequest, generation: Generation, model: str) -> bytes:
    """The finished generation as a JSON body."""
    logprobs = None
    if request.sampling_params.logprobs is not None:
        pairs = zip(generation.token_ids, generation.logprobs, strict=True)
        logprobs = Logprobs([TokenLogprob(f"token_id:{token}", max(value, MIN_LOGPROB)) for token, value in pairs])
    num_prompt, num_sampled = len(generation.prompt), len(generation.token_ids)
    assert generation.finish_reason is not None
    choice = Choice(
        index=0,
        token_ids=generation.token_ids,
        logprobs=logprobs,
        finish_reason=generation.finish_reason,
    )
    response = GenerateResponse(
        request_id=generation.request_id,
        model=model,
        choices=[choice],
        usage=Usage(prompt_tokens=num_prompt, completion_tokens=num_sampled, total_tokens=num_prompt + num_sampled),
        weight_versions=[WeightSpan(version=v, start=start, end=end) for v, start, end in generation.spans],
    )
    return msgspec.json.encode(response)
