"""The judge's sandbox: one forking server for trusted test code, started when first needed.

Owns that sandbox and its control socket. Invariants: no submission is ever in it; a server that died is replaced
at the next job; the jobs that it had become faults of ours.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus

from rollout.errors import Fault, VerifierFault
from rollout.verify.bundle import command
from rollout.verify.channel import FrameChannel
from rollout.verify.config import VerifierConfig
from rollout.verify.host import Host, sandbox_boundary
from sandbox.types import Command, Limits, SandboxSpec

_JOB_REPLY_BYTES = 4 * 1024 * 1024
_DAY_S = 86_400.0
_READY = b"ready"
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Judge:
    """Runs jobs of test code. Use from one event loop; lives as long as the task group it is given."""

    def __init__(self, host: Host, config: VerifierConfig, tasks: TaskGroup) -> None:
        self._host = host
        self._config = config
        self._tasks = tasks
        self._control: socket.socket | None = None
        self._starting = anyio.Lock()
        self.last_fault = ""
        """Why the last server ended; empty while none has."""

    @asynccontextmanager
    async def job(
        self, candidate_fd: int, lifetime_s: float, modules: Sequence[str]
    ) -> AsyncIterator[tuple[FrameChannel, socket.socket]]:
        """The stream of a new job that may call the candidate behind `candidate_fd`, and its server (see `alive`).

        The job is ended when the stream is closed, or by itself after `lifetime_s`. Raises `Fault` when there is
        no judge.
        """
        control = await self._running()
        memory_bytes = self._config.judge_job_memory_bytes
        ours, theirs = socket.socketpair()
        with FrameChannel(ours, _JOB_REPLY_BYTES) as stream:
            try:
                message = " ".join([str(math.ceil(lifetime_s)), str(memory_bytes), *modules]).encode()
                await _send_descriptors(control, message, [candidate_fd, theirs.fileno()])
            finally:
                theirs.close()
            yield stream, control

    async def alive(self, server: socket.socket) -> bool:
        """Whether the very server of a job still answers; when not, how the job ended says nothing."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            try:
                await _send_descriptors(server, b"alive", [theirs.fileno()])
            except VerifierFault:
                return False
            finally:
                theirs.close()
            with anyio.move_on_after(self._config.startup_timeout_s):
                await anyio.wait_readable(ours)
                return _word(ours) == _READY
        return False

    async def _running(self) -> socket.socket:
        async with self._starting:
            if self._control is None:
                self._control = await self._tasks.start(self._serve)
            return self._control

    async def _serve(self, *, task_status: TaskStatus[socket.socket]) -> None:
        """Holds one server's sandbox until it dies or the task group is cancelled."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        started = False
        try:
            with ours, sandbox_boundary("the judge's sandbox"):
                async with self._host.acquire(self._spec()) as box:
                    start = Command(argv=command("judge"), env=_ENVIRONMENT, timeout_s=_DAY_S)
                    async with box.start(start, fds=(null, null, null, theirs.fileno())) as process:
                        theirs.close()
                        await _await_ready(ours, self._config.startup_timeout_s)
                        started = True
                        task_status.started(ours)
                        self.last_fault = str(await process.wait())
        except Fault as fault:
            if not started:
                raise
            self.last_fault = str(fault)
        finally:
            self._control = None
            theirs.close()
            os.close(null)

    def _spec(self) -> SandboxSpec:
        limits = Limits(
            memory_bytes=(self._config.concurrency + 1) * self._config.judge_job_memory_bytes,
            pids=4 * self._config.concurrency + 16,
            cpus=1024.0,
        )
        return SandboxSpec(image=self._config.judge_image, limits=limits)


def _word(sock: socket.socket) -> bytes:
    """What there is to be read; empty when the other end is closed."""
    try:
        return sock.recv(len(_READY))
    except OSError:
        return b""


async def _await_ready(control: socket.socket, timeout_s: float) -> None:
    try:
        with anyio.fail_after(timeout_s):
            await anyio.wait_readable(control)
            if control.recv(len(_READY)) == _READY:
                return
    except TimeoutError:
        raise VerifierFault(f"the judge did not start within {timeout_s:g} s") from None
    except OSError as error:
        raise VerifierFault(f"the judge did not start: {error}") from None
    raise VerifierFault("the judge ended while it started")


async def _send_descriptors(control: socket.socket, message: bytes, descriptors: list[int]) -> None:
    while True:
        try:
            socket.send_fds(control, [message], descriptors)
            return
        except BlockingIOError:
            await anyio.wait_writable(control)
        except OSError as error:
            raise VerifierFault(f"the judge is gone: {error}") from None
