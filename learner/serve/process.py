"""The policy server's life: load, listen, announce, serve, end.

Invariants: one JSON line `{"ready": true, …}` on stdout, printed when requests are served; SIGTERM answers
what is in flight (`abort`) and ends with status 0; a crash of the inference thread ends the process
with status 1 and the traceback on stderr. The socket file is gone after every end but a sudden one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import stat
import sys
from contextlib import suppress
from pathlib import Path

import torch
import uvloop
from aiohttp import web

from learner.serve.app import PolicyServer
from learner.serve.engine import InferenceEngine
from learner.serve.load import load_engine
from rollout.errors import ConfigError
from rollout.lane.weights import WeightSubscriber

SHUTDOWN_S = 2.0


def run(arguments: argparse.Namespace) -> int:
    """Loads the model and serves until told to end; returns the exit status (2: a value cannot be used)."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    torch.set_num_threads(arguments.threads)
    try:
        engine = load_engine(
            model=arguments.model,
            builtin=arguments.builtin,
            dtype=arguments.dtype,
            max_batch=arguments.max_batch,
            max_len=arguments.max_len,
            seed=arguments.seed,
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(arguments, engine))


async def serve(arguments: argparse.Namespace, engine: InferenceEngine) -> int:
    """Serves until SIGTERM or SIGINT (0), or until the inference thread dies (1)."""
    loop = asyncio.get_running_loop()
    weights = None
    if arguments.weights_fd is not None:
        weights = WeightSubscriber(socket.socket(fileno=arguments.weights_fd))
    source = arguments.model or arguments.builtin
    server = PolicyServer(
        engine,
        model_name=source.resolve().name.removesuffix(".json"),
        weights=weights,
        threads=arguments.threads,
        max_waiting=arguments.max_waiting,
    )
    # Everything is made before the thread starts, so that it alone allocates and computes afterwards.
    runner = web.AppRunner(server.make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server.worker.start()
    try:
        address = await listen(runner, arguments)
        print(json.dumps(describe(address, engine, arguments)), flush=True)
        server.crashed.add_done_callback(lambda _: stop.set())
        await stop.wait()
    finally:
        crash = server.crashed.exception() if server.crashed.done() else None
        if crash is None:
            await asyncio.to_thread(server.worker.stop)
        await runner.cleanup()
        if arguments.socket is not None:
            arguments.socket.unlink(missing_ok=True)
    return 0 if crash is None else 1


async def listen(runner: web.AppRunner, arguments: argparse.Namespace) -> dict[str, object]:
    """Opens the listening socket; returns its `address` (`unix:PATH` or `http://HOST:PORT`) and TCP `port`."""
    if arguments.socket is None:
        site = web.TCPSite(runner, arguments.host, arguments.port, backlog=1024)
        await site.start()
        host, port = runner.addresses[0][:2]
        return {"address": f"http://{host}:{port}", "port": port}
    await web.SockSite(runner, bind_unix(arguments.socket), backlog=1024).start()
    return {"address": f"unix:{arguments.socket}", "port": None}


def bind_unix(path: Path) -> socket.socket:
    """A bound socket that only its owner can use, in place of the one that a killed server may have left."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    bound.bind(str(path))
    path.chmod(0o600)  # nobody can connect before `listen`
    return bound


def describe(address: dict[str, object], engine: InferenceEngine, arguments: argparse.Namespace) -> dict[str, object]:
    """The ready line."""
    return {
        "ready": True,
        **address,
        "model": str(arguments.model or arguments.builtin),
        "dtype": arguments.dtype,
        "vocab_size": engine.model.config.vocab_size,
        "max_len": engine.max_len,
        "max_batch": engine.max_batch,
        "kv_bytes": engine.cache.nbytes,
        "weight_version": engine.weight_version,
        "pid": os.getpid(),
    }
