"""A real learner process with a test in the place of engine and policy server."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from rollout.config.learner import LearnerConfig
from rollout.lane.control import LearnerError, LearnerMessage
from rollout.lane.errors import PeerGone
from rollout.lane.ring import LaneWriter
from rollout.lane.weights import WeightSubscriber

REPOSITORY = Path(__file__).resolve().parents[2]


class LearnerProcess:
    """What a test can do with the process."""

    def __init__(self, config: LearnerConfig, run_dir: Path, *, resume: bool) -> None:
        config_path = run_dir / "learner.json"
        config_path.write_bytes(msgspec.json.encode(config))
        engine, learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server, publisher = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent_read, self._parent_pipe = os.pipe()
        fds = (learner.fileno(), publisher.fileno(), parent_read)
        argv = [sys.executable, "-m", "learner.train", "--config", str(config_path), "--run-dir", str(run_dir)]
        argv += ["--lane-fd", str(fds[0]), "--weights-fd", str(fds[1]), "--parent-fd", str(fds[2])]
        argv += ["--resume"] if resume else []
        self.process = subprocess.Popen(argv, pass_fds=fds, cwd=REPOSITORY)
        learner.close()
        publisher.close()
        os.close(parent_read)
        self.writer = LaneWriter(engine, slots=2, slot_bytes=1 << 20)
        self.published: list[tuple[int, bytes]] = []
        self._subscriber = WeightSubscriber(server)

    async def serve(self) -> None:
        """Plays the policy server: takes every published version."""
        while True:
            await anyio.wait_readable(self._subscriber.fileno())
            try:
                self._take_update()
            except PeerGone:
                return

    def _take_update(self) -> None:
        update = self._subscriber.poll()
        if update is not None:
            update.verify()
            self.published.append((update.version, bytes(update.buffer)))
            update.ack()

    def orphan(self) -> None:
        """Closes the pipe that stands for the parent's life."""
        os.close(self._parent_pipe)
        self._parent_pipe = -1

    def end(self) -> None:
        """Kills what still runs and closes everything."""
        self.process.kill()
        self.process.wait()
        self._subscriber.close()
        if self._parent_pipe >= 0:
            self.orphan()

    async def expect(self, kind: type[LearnerMessage]) -> LearnerMessage:
        """Next message of this kind, skipping others; fails on an error message."""
        with anyio.fail_after(60):
            while True:
                message = await self.writer.receive()
                if isinstance(message, kind):
                    return message
                assert not isinstance(message, LearnerError), message.message

    async def exit_code(self, timeout_s: float) -> int:
        """Waits for the end of the process."""
        return await anyio.to_thread.run_sync(lambda: self.process.wait(timeout_s))


@asynccontextmanager
async def learner_process(
    config: LearnerConfig, run_dir: Path, *, resume: bool = False
) -> AsyncIterator[LearnerProcess]:
    """Starts the learner with an open lane; leaves no process behind."""
    learner = LearnerProcess(config, run_dir, resume=resume)
    try:
        async with learner.writer, anyio.create_task_group() as tasks:
            tasks.start_soon(learner.serve)
            yield learner
            tasks.cancel_scope.cancel()
    finally:
        learner.end()
