"""The policy server as a process: `python -m learner.serve`.

Owns start-up and the ways to end. Invariants: one JSON line `{"ready": true, …}` on stdout, printed when
requests are served; EOF on `--parent-fd` ends the process at once, whatever it is doing; a crash
of the inference thread ends it with status 1 and the traceback on stderr.
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
import threading
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


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, loads the model, serves until told to end; returns the exit status."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    if arguments.parent_fd is not None:
        watch_parent(arguments.parent_fd, arguments.socket)
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


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m learner.serve", description=__doc__.splitlines()[0])
    address = parser.add_mutually_exclusive_group(required=True)
    address.add_argument("--socket", type=Path, help="serve on this Unix socket (mode 600)")
    address.add_argument("--port", type=int, help="serve on this TCP port; 0 picks a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address for --port (default: loopback)")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="Hugging Face folder (Llama or Qwen2)")
    model.add_argument("--builtin", type=Path, help="JSON with the sizes and the seed of a built-in decoder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    parser.add_argument(
        "--max-batch", type=int, help="sequences decoded together (default 256, less if memory is small)"
    )
    parser.add_argument("--max-len", type=int, help="tokens per sequence (default: the model's limit, at most 2048)")
    parser.add_argument("--max-waiting", type=int, default=4096, help="requests that may wait for a row (then 429)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the arithmetic")
    parser.add_argument("--seed", type=int, default=0, help="for requests that bring no seed of their own")
    parser.add_argument("--weights-fd", type=int, help="inherited SEQPACKET socket on which weights are published")
    parser.add_argument("--parent-fd", type=int, help="inherited descriptor; its EOF ends this process")
    arguments = parser.parse_args(argv)
    for name, least in (("threads", 1), ("max_waiting", 0), ("max_batch", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    return arguments


def watch_parent(parent_fd: int, socket_path: Path | None) -> None:
    """Ends the process, from a thread of its own, as soon as nobody holds the other end of `parent_fd`."""

    os.set_blocking(parent_fd, True)

    def wait() -> None:
        with suppress(OSError):  # ECONNRESET: the parent is gone as well
            while os.read(parent_fd, 1024):
                pass
        if socket_path is not None:
            socket_path.unlink(missing_ok=True)
        os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()


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


async def listen(runner: web.AppRunner, arguments: argparse.Namespace) -> str:
    """Opens the listening socket; returns its address as `unix:PATH` or `http://HOST:PORT`."""
    if arguments.socket is None:
        site = web.TCPSite(runner, arguments.host, arguments.port, backlog=1024)
        await site.start()
        host, port = runner.addresses[0][:2]
        return f"http://{host}:{port}"
    await web.SockSite(runner, bind_unix(arguments.socket), backlog=1024).start()
    return f"unix:{arguments.socket}"


def bind_unix(path: Path) -> socket.socket:
    """A bound socket that only its owner can use, in place of the one that a killed server may have left."""
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    bound.bind(str(path))
    path.chmod(0o600)  # nobody can connect before `listen`
    return bound


def describe(address: str, engine: InferenceEngine, arguments: argparse.Namespace) -> dict[str, object]:
    """The ready line."""
    return {
        "ready": True,
        "address": address,
        "model": str(arguments.model or arguments.builtin),
        "dtype": arguments.dtype,
        "vocab_size": engine.model.config.vocab_size,
        "max_len": engine.max_len,
        "max_batch": engine.max_batch,
        "kv_bytes": engine.cache.nbytes,
        "weight_version": engine.weight_version,
        "pid": os.getpid(),
    }
