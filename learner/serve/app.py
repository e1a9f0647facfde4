"""The HTTP side of the policy server: aiohttp handlers on the event loop.

Owns the requests in flight. Invariants: at most `max_batch + max_waiting` generations are in flight, more are
answered 429; a request whose client is gone is aborted; no handler computes anything that takes
longer than parsing its own body.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable
from typing import get_args

import msgspec
from aiohttp import web

from learner.serve.engine import InferenceEngine
from learner.serve.errors import AnswerError, InferenceFailed, QueueFull, RequestError
from learner.serve.generation import Generation
from learner.serve.metrics import render_metrics
from learner.serve.protocol import encode_response, parse_request
from learner.serve.worker import InferenceWorker, PauseMode
from rollout.lane.weights import WeightSubscriber

JSON = "application/json"
BYTES_PER_PROMPT_TOKEN = 16
"""Room in a request body for one token id, generously."""


class PolicyServer:
    """Connects HTTP requests to an inference worker. Use it on one running event loop.

    Args:
        engine: handed over to the worker's thread.
        model_name: as `/v1/models` shows it.
        weights: where published weights arrive; None for fixed weights.
        threads: intra-op threads of torch.
        max_waiting: requests that may wait for a free row.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        model_name: str,
        weights: WeightSubscriber | None = None,
        threads: int = 1,
        max_waiting: int = 4096,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._engine = engine
        self._config = engine.model.config
        self._model_name = model_name
        self._limit = engine.max_batch + max_waiting
        self._in_flight: dict[Generation, asyncio.Future[None]] = {}
        self.crashed: asyncio.Future[None] = self._loop.create_future()
        """Set to the exception of the inference thread if it ever dies."""
        self.worker = InferenceWorker(
            engine,
            deliver=lambda finished: self._call(self._resolve, finished),
            crashed=lambda error: self._call(self._fail, error),
            weights=weights,
            threads=threads,
        )

    def make_app(self) -> web.Application:
        """The aiohttp application; run it with `handler_cancellation=True`, which is what notices lost clients."""
        max_body = self._engine.max_len * BYTES_PER_PROMPT_TOKEN + 65_536
        app = web.Application(client_max_size=max_body, middlewares=[answer_errors])
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_post("/pause", self.pause)
        app.router.add_post("/resume", self.resume)
        app.router.add_get("/is_paused", self.paused)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.metrics)
        return app

    async def generate(self, request: web.Request) -> web.Response:
        """Samples a continuation. Cancelled (the client left): the generation is aborted."""
        asked, generation = parse_request(
            await request.read(), self._config, max_len=self._engine.max_len, model_name=self._model_name
        )
        if len(self._in_flight) >= self._limit:
            raise QueueFull("requests in flight", len(self._in_flight), "the server is full; try again later")
        ended: asyncio.Future[None] = self._loop.create_future()
        self._in_flight[generation] = ended
        self.worker.submit(generation)
        try:
            await ended
        except asyncio.CancelledError:
            self.worker.abort(generation)
            raise
        if generation.finish_reason == "error":
            raise InferenceFailed(f"weights of version {self._engine.weight_version} give logits that are not finite")
        return web.Response(body=encode_response(asked, generation, self._model_name), content_type=JSON)

    async def pause(self, request: web.Request) -> web.Response:
        """`POST /pause?mode=abort|wait|keep` (default abort, as in vLLM); answers when sampling has stopped."""
        mode = request.query.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise RequestError("mode", mode, f"must be one of {', '.join(get_args(PauseMode))}")
        await self._settled(self.worker.pause(mode))  # type: ignore[arg-type]
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        """`POST /resume`."""
        await self._settled(self.worker.resume())
        return web.json_response({"status": "resumed"})

    async def paused(self, request: web.Request) -> web.Response:
        """`GET /is_paused`."""
        return web.json_response({"is_paused": self.worker.is_paused})

    async def weight_info(self, request: web.Request) -> web.Response:
        """`GET /weight_info`: the version in use, and the sum of its flat float32 bytes."""
        info = {"weight_version": self._engine.weight_version, "checksum": self.worker.checksum}
        return web.json_response(info)

    async def health(self, request: web.Request) -> web.Response:
        """200 while the inference thread lives."""
        return web.Response(status=503 if self.crashed.done() else 200)

    async def models(self, request: web.Request) -> web.Response:
        """`GET /v1/models`: the one model."""
        card = {"id": self._model_name, "object": "model", "max_model_len": self._engine.max_len}
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus text."""
        return web.Response(text=render_metrics(self._engine, len(self._in_flight)), content_type="text/plain")

    async def _settled(self, command: concurrent.futures.Future[None]) -> None:
        """Waits for a command of the worker, or for the worker's death."""
        done = asyncio.wrap_future(command)
        await asyncio.wait({done, self.crashed}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            self.crashed.result()
        done.result()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Hands something over from the inference thread."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def _resolve(self, finished: list[Generation]) -> None:
        for generation in finished:
            ended = self._in_flight.pop(generation)
            if not ended.done():
                ended.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if not self.crashed.done():
            self.crashed.set_exception(error)
        for ended in self._in_flight.values():
            if not ended.done():
                ended.set_exception(InferenceFailed(f"the inference thread died: {type(error).__name__}: {error}"))
        self._in_flight.clear()


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turns errors into `{"error": {"message", "type", "param", "code"}}`, as OpenAI and vLLM answer."""
    try:
        return await handler(request)
    except AnswerError as error:
        detail = {"message": str(error), "type": error.kind, "param": error.field, "code": error.status}
        headers = {"Retry-After": "1"} if isinstance(error, QueueFull) else None
        body = msgspec.json.encode({"error": detail})
        return web.Response(status=error.status, body=body, content_type=JSON, headers=headers)
