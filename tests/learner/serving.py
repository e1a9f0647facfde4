"""Starts the policy server as its users do: a process with inherited descriptors, spoken to over HTTP."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
from anyio.abc import Process

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = {
    "vocab_size": 60,
    "eos_token_id": 1,
    "dim": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "max_len": 4096,
    "seed": 3,
}


class Server:
    """A running policy server and a client of it."""

    def __init__(self, process: Process, parent_fd: int, session: aiohttp.ClientSession, ready: dict[str, Any]) -> None:
        self.process = process
        self.parent_fd = parent_fd
        self.ready = ready
        self.session = session

    async def generate(self, token_ids: Sequence[int], **params: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        status, body = await self.post("/inference/v1/generate", make_request(token_ids, **params))
        assert status == 200, body
        return body

    async def post(self, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Status and decoded body of a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with self.session.post(f"http://server{path}", data=data) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> dict[str, Any]:
        """Decoded body of a GET that must succeed."""
        async with self.session.get(f"http://server{path}") as response:
            assert response.status == 200
            return await response.json()

    async def metric(self, name: str) -> float:
        """One value of `/metrics`."""
        async with self.session.get("http://server/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"vllm:{name} "))

    async def wait_metric(self, name: str, least: float) -> None:
        """Returns once a metric has reached `least`."""
        with anyio.fail_after(20):
            while await self.metric(name) < least:  # noqa: ASYNC110 (another process)
                await anyio.sleep(0.005)

    async def wait_end(self, timeout_s: float) -> int:
        """The exit status, which must come in time."""
        with anyio.fail_after(timeout_s):
            return await self.process.wait()


@asynccontextmanager
async def serving(
    folder: Path, *flags: str, spec: dict[str, Any] | None = None, weights_fd: int | None = None
) -> AsyncIterator[Server]:
    """A server on a Unix socket in `folder`; ended by EOF on its parent descriptor."""
    spec_path, socket_path = folder / "decoder.json", folder / "policy.sock"
    spec_path.write_text(json.dumps({**SPEC, **(spec or {})}))
    read_end, write_end = os.pipe()
    inherited = [read_end] if weights_fd is None else [read_end, weights_fd]
    command = [sys.executable, "-m", "learner.serve", "--socket", str(socket_path), "--builtin", str(spec_path)]
    command += ["--parent-fd", str(read_end), *flags]
    command += [] if weights_fd is None else ["--weights-fd", str(weights_fd)]
    process = await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=None, pass_fds=inherited, cwd=REPOSITORY
    )
    os.close(read_end)
    assert process.stdout is not None
    try:
        with anyio.fail_after(60):
            ready = json.loads(await process.stdout.receive())
        connector = aiohttp.UnixConnector(str(socket_path), limit=1000)
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Server(process, write_end, session, ready)
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                os.close(write_end)
            with anyio.fail_after(10):
                await process.wait()
            await process.aclose()


def make_request(token_ids: Sequence[int], **params: Any) -> dict[str, Any]:
    """A request body with the parameters that the engine's sampler sends."""
    defaults = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 0, "logprobs": 1}
    return {
        "request_id": "r",
        "token_ids": list(token_ids),
        "sampling_params": {**defaults, "stop_token_ids": [], **params},
        "cache_salt": None,
        "priority": 0,
    }


def make_prompts(num: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random prompts, always the same."""
    rng = random.Random(0)
    return [[rng.randrange(2, vocab_size) for _ in range(length)] for _ in range(num)]
