"""The two processes beside the engine: the policy server and the learner.

Invariant: they are joined to us, and to each other, by inherited descriptors alone (socket pairs and
a pipe); nothing about them has a name that could outlive the run, except the server's socket file
inside the run directory, which the next start replaces.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import msgspec

from rollout.config.learner import LearnerConfig
from rollout.errors import Fault, JournalFault, LearnerFault, SamplerFault, boundary
from rollout.lane.errors import PeerGone
from rollout.lane.writer import LaneWriter
from rollout.train.child import Child, start_child
from rollout.train.config import ServerConfig
from rollout.train.link import LEARNER_SAYS, PEER_REPORT_S

MAX_SOCKET_PATH_BYTES = 100
"""A Unix socket's path is limited to 108 bytes (unix(7)); longer run directories use loopback TCP."""


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """Both processes, running."""

    server: Child
    learner: Child
    server_address: str
    """As `SamplerConfig.server` takes it."""
    writer: LaneWriter


class _Ready(msgspec.Struct):
    ready: bool
    port: int | None = None


@asynccontextmanager
async def start_workers(
    run_dir: Path, learner: LearnerConfig, server: ServerConfig, *, resume: bool
) -> AsyncIterator[Workers]:
    """Starts both and yields when the policy server answers; ends both on leaving.

    Raises:
        SamplerFault: the policy server did not come up.
    """
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    weights_learner, weights_server = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lane_engine, lane_learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listen, socket_path = _listen_arguments(run_dir)
    with weights_learner, weights_server, lane_engine, lane_learner, _removed(socket_path):
        async with start_child(
            "policy server",
            lambda parent_fd: [
                *(sys.executable, "-m", "learner.serve", *listen, *_model_arguments(run_dir, learner)),
                *("--weights-fd", str(weights_server.fileno()), "--parent-fd", str(parent_fd)),
                *("--max-batch", str(server.max_batch), "--threads", str(server.threads)),
            ],
            log_path=logs / "server.log",
            fault=SamplerFault,
            pass_fds=[weights_server.fileno()],
        ) as server_child:
            weights_server.close()
            async with start_child(
                "learner",
                lambda parent_fd: [
                    *(sys.executable, "-m", "learner.train", "--config", str(_learner_file(run_dir, learner))),
                    *("--lane-fd", str(lane_learner.fileno()), "--weights-fd", str(weights_learner.fileno())),
                    *("--parent-fd", str(parent_fd), "--run-dir", str(run_dir), *(["--resume"] if resume else [])),
                ],
                log_path=logs / "learner.log",
                fault=LearnerFault,
                pass_fds=[lane_learner.fileno(), weights_learner.fileno()],
            ) as learner_child:
                lane_learner.close()
                weights_learner.close()
                port = await _wait_ready(server_child, server.ready_timeout_s)
                async with _open_lane(lane_engine, learner_child) as writer:
                    yield Workers(
                        server=server_child,
                        learner=learner_child,
                        server_address=f"unix:{socket_path}" if socket_path else f"http://127.0.0.1:{port}",
                        writer=writer,
                    )


@asynccontextmanager
async def _open_lane(sock: socket.socket, learner: Child) -> AsyncIterator[LaneWriter]:
    """The open lane; a learner that died before it took the lane is reported by how it died."""
    async with AsyncExitStack() as stack:
        try:
            writer = await stack.enter_async_context(LaneWriter(sock))
        except PeerGone:
            with anyio.move_on_after(PEER_REPORT_S):
                await learner.watch()
            raise
        yield writer


def _listen_arguments(run_dir: Path) -> tuple[list[str], Path | None]:
    path = run_dir.resolve() / "server.sock"
    if len(bytes(path)) <= MAX_SOCKET_PATH_BYTES:
        return ["--socket", str(path)], path
    return ["--port", "0"], None


@contextmanager
def _removed(path: Path | None) -> Iterator[None]:
    """No file at `path`, before and after: a killed server leaves its socket's name."""
    if path is None:
        yield
        return
    path.unlink(missing_ok=True)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _learner_file(run_dir: Path, learner: LearnerConfig) -> Path:
    path = run_dir / "learner.json"
    _write(path, msgspec.json.encode(learner))
    return path


def _write(path: Path, content: bytes) -> None:
    with boundary(JournalFault, f"writing {path}", OSError):
        path.write_bytes(content)


def _model_arguments(run_dir: Path, learner: LearnerConfig) -> list[str]:
    model = learner.model
    if model.path is not None:
        return ["--model", model.path]
    spec = {
        **{name: getattr(model, name) for name in ("vocab_size", "eos_token_id", "dim", "layers", "heads", "max_len")},
        "kv_heads": model.kv_heads or model.heads,
        "seed": model.seed,
    }
    path = run_dir / "model.json"
    _write(path, msgspec.json.encode(spec))
    return ["--builtin", str(path)]


async def _wait_ready(server: Child, timeout_s: float) -> int | None:
    """Reads the server's one line of stdout; returns its TCP port, if it listens on one."""
    assert server.process.stdout is not None
    line = b""
    try:
        with anyio.fail_after(timeout_s):
            while not line.endswith(b"\n"):
                line += await server.process.stdout.receive(4096)
    except anyio.EndOfStream:
        with anyio.move_on_after(5.0):
            await server.watch()
        raise SamplerFault("the policy server closed its output before it was ready") from None
    except TimeoutError:
        raise SamplerFault(f"the policy server was not ready after {timeout_s:g} s (server.ready_timeout_s)") from None
    try:
        return msgspec.json.decode(line, type=_Ready).port
    except msgspec.DecodeError as error:
        raise SamplerFault(f"the policy server's first line is not what was agreed: {line[:200]!r}") from error


def root_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one failure to report of several that came together.

    A bug outranks a fault; among faults, what the learner said outranks the end of a process, and that
    outranks what it caused.
    """
    leaves = list(_leaves(failures))
    bugs = [leaf for leaf in leaves if not isinstance(leaf, Fault)]
    if bugs:
        return bugs[0]
    told = [leaf for leaf in leaves if str(leaf).startswith(LEARNER_SAYS)]
    ended = [leaf for leaf in leaves if " ended: " in str(leaf)]
    return (told or ended or leaves)[0]


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
