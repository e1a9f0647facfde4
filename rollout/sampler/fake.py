"""A fake policy server over a Unix socket, for tests and benchmarks.

Speaks the API that `VllmSampler` speaks. Owns its socket. Invariant: it answers valid actions
unless a fault was injected; what each request gets depends on the request alone.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import orjson
from aiohttp import web

Respond = Callable[[dict[str, Any]], list[int]]
"""Request body to the token ids of the action, stop token included."""
Fault = Callable[[int], str | None]
"""Number of the request, from 0, to a fault: `500`, `400`, `429`, `reset`, `hang`, `garbage`, `short_logprobs`,
`positive`, `bad_id`, `gap`, `abort`, `no_versions`, `empty`; None for none."""


class FakeServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the fake behaves."""

    vocab_size: int = 259
    weight_version: int = 0
    mean_latency_s: float = 0.0
    """Log-normal around this mean; 0 answers at once."""
    seed: int = 0


class FakeServer:
    """The handlers and their counters; made by `serve_fake`."""

    def __init__(self, respond: Respond, config: FakeServerConfig, fault: Fault | None) -> None:
        self._respond = respond
        self._config = config
        self._fault = fault
        self.weight_version = config.weight_version
        self.requests: list[dict[str, Any]] = []
        self.cancelled = anyio.Event()
        """A client has given up on a request that hung."""

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/health", self._health)
        app.router.add_get("/weight_info", self._weight_info)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _weight_info(self, request: web.Request) -> web.Response:
        return _json({"weight_version": self.weight_version, "checksum": "0"})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        number = len(self.requests)
        self.requests.append(body)
        fault = self._fault(number) if self._fault is not None else None
        if self._config.mean_latency_s:
            rng = random.Random(f"{self._config.seed} {body['sampling_params'].get('seed')} {len(body['token_ids'])}")
            await anyio.sleep(self._config.mean_latency_s * rng.lognormvariate(-0.125, 0.5))
        if fault == "429":
            return web.Response(status=429, text="the queue is full", headers={"Retry-After": "0"})
        if fault in ("500", "400"):
            return web.Response(status=int(fault), text="injected failure")
        if fault == "garbage":
            return web.Response(body=b"{not json", content_type="application/json")
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault == "hang":
            try:
                await anyio.sleep_forever()
            finally:
                self.cancelled.set()
        return _json(self._answer(body, fault))

    def _answer(self, body: dict[str, Any], fault: str | None) -> dict[str, Any]:
        params = body["sampling_params"]
        token_ids = self._respond(body)[: params["max_tokens"]]
        finish = "stop" if token_ids and token_ids[-1] in params["stop_token_ids"] else "length"
        logprobs = [-0.5] * len(token_ids)
        spans = [{"version": self.weight_version, "start": 0, "end": len(token_ids)}]
        if fault == "short_logprobs":
            logprobs.pop()
        elif fault == "positive":
            logprobs[0] = 0.25
        elif fault == "bad_id":
            token_ids[0] = self._config.vocab_size
        elif fault == "gap":
            spans[0]["end"] -= 1
        elif fault == "abort":
            finish = "abort"
        elif fault == "no_versions":
            spans = []
        elif fault == "empty":
            token_ids, logprobs, spans = [], [], []
        content = [{"token": f"token_id:{t}", "logprob": lp} for t, lp in zip(token_ids, logprobs, strict=False)]
        choice = {"index": 0, "token_ids": token_ids, "logprobs": {"content": content}, "finish_reason": finish}
        return {"request_id": body.get("request_id", ""), "choices": [choice], "weight_versions": spans}


@asynccontextmanager
async def serve_fake(
    socket: Path, respond: Respond, *, config: FakeServerConfig | None = None, fault: Fault | None = None
) -> AsyncIterator[FakeServer]:
    """Serves on a Unix socket until the block is left.

    Args:
        socket: path of the socket to make.
        respond: decides the actions.
        config: see there.
        fault: injects failures.
    """
    server = FakeServer(respond, config or FakeServerConfig(), fault)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(socket)).start()
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await runner.cleanup()


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
