"""One submission, loaded in a fresh sandbox of its own, ready to be called.

Owns that sandbox and the engine's end of the channel to it. Invariants: no sandbox holds two submissions; what the
submission does (does not load, dies, overruns its time, answers nonsense) is recorded in `failure`, a
value; only what is ours raises a `Fault`.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from rollout.errors import SandboxFault, VerifierFault
from rollout.tasks.types import Task
from rollout.verify.bundle import command
from rollout.verify.channel import ChannelClosed, FrameChannel
from rollout.verify.config import VerifierConfig
from rollout.verify.guest.codec import CodecError
from rollout.verify.guest.messages import candidate_message
from rollout.verify.host import Host, Process, sandbox_boundary
from sandbox.types import Command, Limits, Outcome, Reason, SandboxSpec

_REAP_TIMEOUT_S = 10.0
_SLACK_S = 30.0
"""The sandbox's own time limit is a backstop behind the deadlines kept here."""
_FRAME_OVERHEAD_BYTES = 4096


class Candidate:
    """The engine's handle of a loaded submission; made by `open_candidate`.

    Attributes:
        failure: empty while the submission can be called; else why it cannot, for people (and, in a visible
            layer, for the policy) to read.
        loaded: False when it ended or failed before its first call.
        cpu_s: what it may use for one test set.
        timeout_s: wall seconds for one test set; longer than `cpu_s`, so that a busy host fails nobody.
    """

    def __init__(self, process: Process, channel: FrameChannel, cpu_s: float, timeout_s: float) -> None:
        self._process = process
        self.channel = channel
        self.cpu_s = cpu_s
        self.timeout_s = timeout_s
        self.failure = ""
        self.loaded = False

    async def load(self, program: str, max_reply_bytes: int) -> None:
        """Runs the program's top level; sets `loaded`, or `failure`."""
        frame: list[Any] = []
        with anyio.move_on_after(self.timeout_s) as scope:
            frame = await self.exchange(["load", program, max_reply_bytes, True, self.cpu_s])
        if scope.cancelled_caught:
            await self.overran()
        elif frame[:1] == ["loaded"]:
            self.loaded = True
        elif frame and not self.failure:
            self.failure = self._load_failure(frame)

    async def limit(self) -> None:
        """Starts the CPU seconds of the next test set."""
        try:
            await self.channel.send(["limit", self.cpu_s])
        except ChannelClosed:
            await self.ended()

    async def exchange(self, frame: list[Any]) -> list[Any]:
        """Sends one frame and returns the answer, or an empty list after setting `failure`."""
        try:
            await self.channel.send(frame)
        except ChannelClosed:
            await self.ended()
            return []
        return await self.receive()

    async def receive(self) -> list[Any]:
        """The next answer, its fields of the types that they should have, or an empty list after setting `failure`."""
        try:
            return candidate_message(await self.channel.receive(hashed=False))
        except ChannelClosed:
            await self.ended()
        except CodecError as error:
            self.failure = f"protocol: the program sent {error}"
        return []

    async def overran(self) -> None:
        """Records that a deadline passed, and kills the program."""
        self.failure = _timeout(self.cpu_s)
        with anyio.CancelScope(shield=True), anyio.move_on_after(_REAP_TIMEOUT_S):
            with sandbox_boundary("killing a submission"):
                await self._process.kill()

    async def ended(self) -> None:
        """Records why the program is gone; kills it if it only closed its channel."""
        outcome = await self._outcome()
        self.failure = self.failure or explain(outcome, self.cpu_s)

    async def _outcome(self) -> Outcome:
        with sandbox_boundary("waiting for a submission to end"):
            with anyio.move_on_after(1.0):
                return await self._process.wait()
            await self._process.kill()
            with anyio.move_on_after(_REAP_TIMEOUT_S):
                return await self._process.wait()
        raise SandboxFault("a killed submission did not end")

    @staticmethod
    def _load_failure(frame: list[Any]) -> str:
        if frame[0] == "failed":
            return f"{frame[1]}: {frame[2]}"[:2000]
        return "protocol: the program answered before it was asked"


def _timeout(cpu_s: float) -> str:
    return f"timeout: not done within {cpu_s:g} s"


def explain(outcome: Outcome, cpu_s: float) -> str:
    """A submission's outcome in words, its reason first."""
    match outcome.reason:
        case Reason.TIMEOUT:
            return _timeout(cpu_s)
        case Reason.SIGNAL if outcome.signal == signal.SIGPROF:
            return _timeout(cpu_s)  # the timer that the candidate program sets for itself
        case Reason.OOM:
            return "oom: out of memory"
        case Reason.SIGNAL:
            return f"signal: ended by signal {outcome.signal}"
        case Reason.EXIT:
            return f"exit: the program ended itself with exit code {outcome.exit_code}"
        case Reason.KILLED:
            return "exit: the program closed its channel"
        case reason:
            return f"{reason.value}: the program hit its {reason.value} limit"


def sandbox_spec(task: Task) -> SandboxSpec:
    """The candidate's sandbox: the task's image and memory, little else."""
    return SandboxSpec(image=task.image, limits=Limits(memory_bytes=task.limits.memory_bytes))


@asynccontextmanager
async def open_candidate(
    host: Host, task: Task, program: str, config: VerifierConfig, num_layers: int
) -> AsyncIterator[Candidate]:
    """A fresh sandbox with `program` loaded (or `failure` set); everything is gone on leaving.

    Raises `SandboxFault` or `VerifierFault` for faults of ours; cancelling kills the sandbox.
    """
    cpu_s = task.limits.verify_cpu_s or task.limits.verify_timeout_s
    timeout_s = task.limits.verify_timeout_s * config.wall_factor
    start = Command(
        argv=command("candidate"),
        env={"PYTHONHASHSEED": "0"},
        timeout_s=timeout_s * (num_layers + 1) + _SLACK_S,
        cpu_s=cpu_s * (num_layers + 1) + _SLACK_S,
    )
    ours, theirs = socket.socketpair()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    with FrameChannel(ours, config.max_reply_bytes + _FRAME_OVERHEAD_BYTES) as channel:
        try:
            with sandbox_boundary(f"a sandbox for {task.id}"):
                async with host.acquire(sandbox_spec(task)) as box:
                    async with box.start(start, fds=(null, null, null, theirs.fileno())) as process:
                        theirs.close()
                        await _await_ready(channel, process, config.startup_timeout_s)
                        candidate = Candidate(process, channel, float(cpu_s), timeout_s)
                        await candidate.load(program, config.max_reply_bytes)
                        yield candidate
        finally:
            theirs.close()
            os.close(null)


async def _await_ready(channel: FrameChannel, process: Process, timeout_s: float) -> None:
    """Waits for our own program's first word; no submitted code has run yet, so a failure is ours."""
    try:
        with anyio.fail_after(timeout_s):
            if await channel.receive() != ["ready"]:
                raise VerifierFault("the candidate program started with nonsense")
    except TimeoutError:
        raise VerifierFault(f"the candidate program did not start within {timeout_s:g} s") from None
    except (ChannelClosed, CodecError) as error:
        with anyio.move_on_after(1.0):
            outcome = await process.wait()
            raise VerifierFault(f"the candidate program did not start: {outcome}") from None
        raise VerifierFault(f"the candidate program did not start: {error}") from None
