"""The client of a policy server that speaks vLLM's token-in, token-out API.

Owns one pool of HTTP connections. Invariant: every answer handed out is valid (see `Action`), and
every request ends within its deadline, retries included.

The schema is vLLM's `vllm/entrypoints/serve/disagg/protocol.py`: `POST /inference/v1/generate`.
"""

from __future__ import annotations

import random
import secrets
from types import TracebackType
from typing import Any, Self

import aiohttp
import anyio
import msgspec
import orjson

from rollout.errors import SamplerFault, boundary
from rollout.sampler.config import SamplerConfig
from rollout.sampler.types import Action, SampleRequest, validate_action
from rollout.types import VersionSpan

_TOKEN_PREFIX = "token_id:"
_ERROR_CHARS = 300
TOO_MANY_REQUESTS = 429
DEFAULT_BUSY_S = 1.0
"""Before a request that met a full queue is sent again, where the server names no time."""
MIN_BUSY_S, MAX_BUSY_S = 0.05, 30.0


class _Logprob(msgspec.Struct):
    token: str
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Span(msgspec.Struct):
    version: int | str
    start: int
    end: int


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice]
    weight_versions: list[_Span] | None = None


class _WeightInfo(msgspec.Struct):
    weight_version: int | str


_DECODE_RESPONSE = msgspec.json.Decoder(_Response)


class _Retryable(Exception):
    """The server may answer the same request well in a moment (a reset, a 5xx)."""


class _Busy(_Retryable):
    """The server's queue is full; `retry_after` is its header's text, in seconds."""

    def __init__(self, message: str, retry_after: str | None) -> None:
        super().__init__(message)
        asked_s = float(retry_after) if retry_after and retry_after.isdigit() else DEFAULT_BUSY_S
        self.retry_after_s = min(max(asked_s, MIN_BUSY_S), MAX_BUSY_S)


class VllmSampler:
    """`Sampler` over HTTP; use it as `async with VllmSampler(config) as sampler`.

    Args:
        config: where the server is and how patient to be.
        vocab_size: ids at or above it make an answer a fault; None skips the check.
    """

    def __init__(self, config: SamplerConfig, *, vocab_size: int | None = None) -> None:
        self.config = config
        self.num_requests = 0
        self.num_retries = 0
        self._vocab_size = vocab_size
        self._session: aiohttp.ClientSession | None = None
        self._rng = random.Random(0)
        self._name = secrets.token_hex(4)
        self._base = "http://policy" if config.server.startswith("unix:") else config.server.rstrip("/")

    async def __aenter__(self) -> Self:
        limit = self.config.max_connections
        connector: aiohttp.BaseConnector
        if self.config.server.startswith("unix:"):
            connector = aiohttp.UnixConnector(self.config.server.removeprefix("unix:"), limit=limit)
        else:
            connector = aiohttp.TCPConnector(limit=limit)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.config.connect_timeout_s)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            with anyio.move_on_after(5, shield=True):
                await session.close()

    async def sample(self, request: SampleRequest) -> Action:
        """See `Sampler.sample`."""
        self.num_requests += 1
        body = orjson.dumps(self._payload(request))
        raw = await self._with_retries("POST", "/inference/v1/generate", body, request.timeout_s)
        try:
            response = _DECODE_RESPONSE.decode(raw)
        except msgspec.DecodeError as error:
            raise SamplerFault(f"the policy server's answer breaks the schema: {error}") from error
        action = self._action(response)
        return validate_action(action, max_tokens=request.max_tokens, vocab_size=self._vocab_size)

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns once `/health` answers 200.

        Raises:
            SamplerFault: it did not within `timeout_s`.
        """
        problem = "no answer"
        with anyio.move_on_after(timeout_s):
            while True:
                try:
                    await self._once("GET", "/health", None)
                    return
                except (_Retryable, SamplerFault) as error:
                    problem = str(error)
                await anyio.sleep(0.05)
        raise SamplerFault(f"no healthy policy server at {self.config.server} within {timeout_s:g} s: {problem}")

    async def weight_version(self, timeout_s: float = 10.0) -> int:
        """The version of the weights that the server samples with now."""
        raw = await self._with_retries("GET", "/weight_info", None, timeout_s)
        with boundary(SamplerFault, "reading /weight_info", msgspec.DecodeError, ValueError):
            return int(msgspec.json.decode(raw, type=_WeightInfo).weight_version)

    def _payload(self, request: SampleRequest) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": request.seed,
            "stop_token_ids": list(request.stop_token_ids),
            "logprobs": 1,
        }
        payload: dict[str, Any] = {
            "request_id": f"{self._name}-{self.num_requests}",
            "token_ids": request.token_ids,
            "sampling_params": params,
            "cache_salt": request.cache_salt,
            "priority": request.priority,
        }
        if self.config.model is not None:
            payload["model"] = self.config.model
        return payload

    async def _with_retries(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        doing = f"{method} {path} at {self.config.server}"
        problem: _Retryable | None = None
        with anyio.move_on_after(timeout_s):
            num_failures = 0
            while True:
                try:
                    return await self._once(method, path, body)
                except _Busy as error:
                    # A full queue is no failure: the request waits its turn, within its own deadline.
                    problem, wait_s = error, error.retry_after_s
                except _Retryable as error:
                    problem = error
                    num_failures += 1
                    wait_s = self.config.backoff_s * 2**num_failures
                    if num_failures > self.config.max_retries:
                        raise SamplerFault(f"{doing}: {problem} ({num_failures} tries)") from problem
                self.num_retries += 1
                await anyio.sleep(self._rng.uniform(0.5, 1.0) * wait_s)
        suffix = f"; last: {problem}" if problem else ""
        raise SamplerFault(f"{doing}: no answer within {timeout_s:g} s{suffix}")

    async def _once(self, method: str, path: str, body: bytes | None) -> bytes:
        if self._session is None:
            raise SamplerFault("the sampler is not open: use it as an async context manager")
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session.request(method, self._base + path, data=body, headers=headers) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _Retryable(f"{type(error).__name__}: {error}") from error
        if response.status == TOO_MANY_REQUESTS:
            raise _Busy(f"HTTP {response.status}: {_excerpt(raw)}", response.headers.get("Retry-After"))
        if response.status >= 500:
            raise _Retryable(f"HTTP {response.status}: {_excerpt(raw)}")
        if response.status != 200:
            raise SamplerFault(f"{method} {path}: HTTP {response.status}: {_excerpt(raw)}")
        return raw

    def _action(self, response: _Response) -> Action:
        choice = next((choice for choice in response.choices if choice.index == 0), None)
        if choice is None or choice.token_ids is None:
            raise SamplerFault("the policy server's answer holds no token ids")
        content = choice.logprobs.content if choice.logprobs is not None else None
        if content is None:
            raise SamplerFault("the policy server's answer holds no logprobs")
        for token_id, entry in zip(choice.token_ids, content, strict=False):
            if entry.token.startswith(_TOKEN_PREFIX) and entry.token != f"{_TOKEN_PREFIX}{token_id}":
                raise SamplerFault(f"logprob of {entry.token} stands beside token id {token_id}")
        return Action(
            token_ids=choice.token_ids,
            logprobs=[entry.logprob for entry in content],
            finish_reason=choice.finish_reason or "none",
            spans=self._spans(choice.weight_versions or response.weight_versions, len(choice.token_ids)),
        )

    def _spans(self, reported: list[_Span] | None, num_tokens: int) -> tuple[VersionSpan, ...]:
        if reported:
            with boundary(SamplerFault, "reading weight versions", ValueError):
                return tuple(VersionSpan(span.start, span.end, int(span.version)) for span in reported)
        if self.config.assume_version is None:
            raise SamplerFault("the policy server reports no weight versions (set sampler.assume_version)")
        return (VersionSpan(0, num_tokens, self.config.assume_version),)


def _excerpt(raw: bytes) -> str:
    return raw[:_ERROR_CHARS].decode("utf-8", "replace").strip()
