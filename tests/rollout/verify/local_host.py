"""A host without isolation, for trusted test programs: the verifier's own logic, without a sandbox's cost.

Satisfies `rollout.verify.host.Host`. Hostile programs are only ever given to real sandboxes.
"""

from __future__ import annotations

import os
import signal
import sys
import sysconfig
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from sandbox.errors import StartError
from sandbox.types import Command, Outcome, Reason, SandboxSpec, Usage


class LocalProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._killed = False
        self._status: int | None = None
        self._lock = anyio.Lock()

    async def wait(self) -> Outcome:
        async with self._lock:
            if self._status is None:
                await anyio.wait_readable(self._pidfd)
                self._status = os.waitpid(self.pid, 0)[1]  # noqa: ASYNC222 - it has ended
                os.close(self._pidfd)
        code = os.waitstatus_to_exitcode(self._status)
        reason = Reason.KILLED if self._killed else Reason.EXIT if code >= 0 else Reason.SIGNAL
        return Outcome(
            reason=reason,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=b"",
            stderr=b"",
            usage=Usage(),
        )

    async def kill(self) -> None:
        if self._status is None:
            self._killed = True
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            await self.wait()


class LocalBox:
    @asynccontextmanager
    async def start(self, command: Command, fds: Sequence[int] = ()) -> AsyncIterator[LocalProcess]:
        argv = [sys.executable if command.argv[0] == "python3" else command.argv[0], *command.argv[1:]]
        actions = [(os.POSIX_SPAWN_DUP2, fd, i) for i, fd in enumerate(fds)]
        # numpy lies in the virtual environment, which `-S` leaves out.
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": sysconfig.get_path("purelib"), **command.env}
        pid = os.posix_spawn(argv[0], argv, environment, file_actions=actions)  # noqa: ASYNC221 - returns at once
        process = LocalProcess(pid)
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await process.kill()


class LocalHost:
    """Counts sandboxes; the first `failures` acquisitions fail as a broken sandbox layer would."""

    def __init__(self, failures: int = 0) -> None:
        self.num_acquired = 0
        self.specs: list[SandboxSpec] = []
        self._failures = failures

    @asynccontextmanager
    async def acquire(self, spec: SandboxSpec) -> AsyncIterator[LocalBox]:
        self.num_acquired += 1
        self.specs.append(spec)
        if self.num_acquired <= self._failures:
            raise StartError("planted: no jail came up")
        yield LocalBox()
