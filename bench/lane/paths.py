"""Two ways to another process, the lane and a pickling queue, each with its consumer process.

Owns those processes. Invariants: a burst is over when its consumer holds the last batch's columns in memory of its own
and has said so; a consumer ends when its producer does.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from bench.lag import LagProbe
from bench.lane.data import with_last
from bench.records import CannotMeasure
from bench.rounds import Batch, percentile
from rollout.lane.batch import FrameParts
from rollout.lane.control import StepDone
from rollout.lane.errors import PeerGone
from rollout.lane.ring import LaneReader, LaneWriter

_QUEUE_LENGTH = 8
_JOIN_S = 10.0
_ANSWER_S = 60.0

Burst = Callable[[int], Awaitable[None]]
"""Sends that many batches and returns when the consumer has them all."""


class BurstPeer:
    """A path for batches, measured in bursts; a sample is a burst's seconds divided by its batches.

    Args:
        num_batches: of one burst; several are under way at once, as far as the path's buffer allows.
    """

    def __init__(self, name: str, burst: Burst, num_batches: int) -> None:
        self.name = name
        self._burst = burst
        self._num_batches = num_batches
        self.lags_s: list[float] = []
        """How late the heartbeats on the sending loop came, all batches together."""
        self.stall_p99s_s: list[float] = []
        """Of each batch, the first one included: how long the loop was held up, without waiting for a CPU."""

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """Bursts, one after the other, until the slice is over."""
        samples_s: list[float] = []
        began = time.perf_counter()
        with LagProbe() as probe:
            while not samples_s or time.perf_counter() - began < slice_s:
                start = time.perf_counter()
                await self._burst(self._num_batches)
                samples_s.append((time.perf_counter() - start) / self._num_batches)
            wall_s = time.perf_counter() - began
        self.lags_s += probe.lags_s
        self.stall_p99s_s.append(percentile(probe.stalls_s, 0.99))
        return Batch(samples_s=samples_s, wall_s=wall_s, num_operations=self._num_batches * len(samples_s))


@asynccontextmanager
async def open_lane() -> AsyncIterator[LaneWriter]:
    """A lane whose reader is another process that copies each frame's token columns out."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = multiprocessing.get_context("spawn").Process(target=_read_lane, args=(theirs,), daemon=True)
    await anyio.to_thread.run_sync(process.start)
    theirs.close()
    try:
        async with LaneWriter(ours) as writer:
            yield writer
    finally:
        await _end(process)


def lane_burst(writer: LaneWriter, parts: FrameParts) -> Burst:
    """Writes the frame again and again."""
    last = with_last(parts, last=True)

    async def burst(num_batches: int) -> None:
        for _ in range(num_batches - 1):
            await writer.write(parts)
        await writer.write(last)
        with anyio.fail_after(_ANSWER_S):
            await writer.receive()

    return burst


def _read_lane(sock: socket.socket) -> None:
    with LaneReader(sock) as reader:
        staging: dict[str, Any] = {}
        while True:
            try:
                with reader.lease(3600.0) as frame:
                    for name in ("token_ids", "loss_mask", "logprobs"):
                        column = getattr(frame, name)
                        if name not in staging or len(staging[name]) < len(column):
                            staging[name] = np.empty_like(column)
                        np.copyto(staging[name][: len(column)], column)
                    del column
                    last = frame.meta.last_of_step
                if last:
                    reader.send(StepDone(step=0, kind="rl", metrics={}))
            except PeerGone:
                return


class QueuePath:
    """A `multiprocessing.Queue` and its consumer; made by `open_queue`."""

    def __init__(self, queue: Any, answers: Connection) -> None:
        self._queue = queue
        self._answers = answers

    def burst(self, make: Callable[[], object]) -> Burst:
        """Sends what `make` returns; `make` runs in a thread, once per batch, as does the queue's own pickling."""

        def put(last: bool) -> None:
            self._queue.put((make(), last), timeout=_ANSWER_S)

        async def burst(num_batches: int) -> None:
            for index in range(num_batches):
                await anyio.to_thread.run_sync(put, index == num_batches - 1)
            with anyio.fail_after(_ANSWER_S):
                await anyio.wait_readable(self._answers.fileno())
            try:
                self._answers.recv_bytes()
            except EOFError:
                raise CannotMeasure("the consumer of the queue has ended") from None

        return burst


@asynccontextmanager
async def open_queue() -> AsyncIterator[QueuePath]:
    """A bounded queue whose consumer is another process that joins each batch's arrays."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(_QUEUE_LENGTH)
    answers, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_read_queue, args=(queue, theirs), daemon=True)
    await anyio.to_thread.run_sync(process.start)
    theirs.close()
    try:
        yield QueuePath(queue, answers)
    finally:
        queue.put(None)
        queue.close()
        await _end(process)
        answers.close()


def _read_queue(queue: Any, answers: Connection) -> None:
    while (item := queue.get()) is not None:
        batch, last = item
        columns = _joined(batch)
        assert all(len(column) == len(columns[0]) for column in columns)
        if last:
            answers.send_bytes(b"k")


def _joined(batch: Sequence[Any]) -> list[Any]:
    """The batch's three columns: as they came, or joined from those of its trajectories."""
    if isinstance(batch[0], np.ndarray):
        return list(batch)
    return [np.concatenate(column) for column in zip(*batch, strict=True)]


async def _end(process: SpawnProcess) -> None:
    """Waits for a consumer whose producer has gone; kills it when it takes too long."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(process.join, _JOIN_S)
        if process.exitcode is None:
            process.kill()
            await anyio.to_thread.run_sync(process.join, _JOIN_S)
        process.close()
