"""The inference thread: one loop that applies commands and weights between two steps of the engine.

Owns the engine and the weights socket. Invariants: nothing but this thread touches the model or the
engine; every submitted generation is handed to `deliver` exactly once; weights change only between two
decode steps, after their checksum was verified, and are acknowledged only when they are in use.

    event loop ── commands (deque + eventfd) ──► thread ── deliver(list of finished) ──► event loop
    learner    ── weights socket ──────────────►
"""

from __future__ import annotations

import collections
import logging
import os
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import numpy as np
import torch
from torch import nn

from learner.flat import flat_nbytes, read_flat
from learner.serve.engine import InferenceEngine
from learner.serve.generation import Generation
from rollout.lane.errors import PeerGone, WeightsFault
from rollout.lane.weights import WeightSubscriber, WeightUpdate

PauseMode = Literal["abort", "wait", "keep"]

logger = logging.getLogger(__name__)


class InferenceWorker:
    """Runs an engine in a thread of its own. All public methods may be called from any thread.

    Args:
        engine: used by the thread alone from `start` on.
        deliver: called in the thread with generations that have ended; must only hand them over.
        crashed: called in the thread, once, when it dies of an exception.
        weights: where published weights arrive; None for fixed weights.
        threads: intra-op threads of torch.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        deliver: Callable[[list[Generation]], None],
        crashed: Callable[[BaseException], None],
        weights: WeightSubscriber | None = None,
        threads: int = 1,
    ) -> None:
        self.engine = engine
        self.checksum = model_checksum(engine.model)
        """Sum of the flat weights in use, hexadecimal: the number that published weights carry."""
        self.is_paused = False
        self._deliver = deliver
        self._crashed = crashed
        self._weights = weights
        self._threads = threads
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        if weights is not None:
            self._poll.register(weights, select.POLLIN)
        self._admitting = True
        self._draining: list[Future[None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="inference", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after its current step and waits for it; unfinished generations are aborted."""
        self._post(self._stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the inference thread did not end within {timeout_s} s")
        os.close(self._wake_fd)

    def submit(self, generation: Generation) -> None:
        """Queues a generation."""
        self._post(lambda: self.engine.submit(generation))

    def abort(self, generation: Generation) -> None:
        """Ends a generation early; it is delivered with what it has, unless it has ended already."""
        self._post(lambda: self._deliver([generation] if self.engine.abort(generation) else []))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stops sampling; done when it has stopped.

        `keep` freezes running generations until `resume`; `abort` ends everything; `wait` lets running ones end
        first. Requests that arrive meanwhile wait. Weight updates are applied all the same.
        """
        paused: Future[None] = Future()
        self._post(lambda: self._pause(mode, paused))
        return paused

    def resume(self) -> Future[None]:
        """Goes on sampling."""
        resumed: Future[None] = Future()
        self._post(lambda: self._resume(resumed))
        return resumed

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake_fd, 1)

    def _main(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            # The boundary of the thread: whatever it was, the process must end and say why.
            self._crashed(error)
            raise

    def _turn(self) -> None:
        """One round: commands, weights, and a step or a sleep."""
        while self._commands:
            self._commands.popleft()()
        if self._weights is not None:
            self._take_weights(self._weights)
        if not self.is_paused and self.engine.has_work and (self._admitting or self.engine.num_running):
            finished = self.engine.step(admit=self._admitting)
            if finished:
                self._deliver(finished)
            self._settle_drain()
        elif not self._commands and not self._stopping:
            self._sleep()

    def _sleep(self) -> None:
        """Waits for a command or for weights."""
        for fd, _ in self._poll.poll():
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)

    def _stop(self) -> None:
        self._deliver(self.engine.abort_all())
        self._stopping = True

    def _pause(self, mode: PauseMode, paused: Future[None]) -> None:
        if mode == "wait" and self.engine.num_running and not self.is_paused:
            self._admitting = False
            self._draining.append(paused)
            return
        if mode == "abort":
            self._deliver(self.engine.abort_all())
        self.is_paused = True
        paused.set_result(None)
        self._settle_drain()

    def _settle_drain(self) -> None:
        """Completes `pause(wait)` once nothing runs any more, or once a stronger pause has come."""
        if self._draining and (self.is_paused or not self.engine.num_running):
            self.is_paused = True
            for waiting in self._draining:
                waiting.set_result(None)
            self._draining.clear()

    def _resume(self, resumed: Future[None]) -> None:
        self.is_paused, self._admitting = False, True
        for waiting in self._draining:
            waiting.set_result(None)
        self._draining.clear()
        resumed.set_result(None)

    def _take_weights(self, weights: WeightSubscriber) -> None:
        """Applies a published version, if one waits."""
        try:
            update = weights.poll()
            if update is not None:
                self._apply(update)
        except PeerGone as gone:
            logger.warning("no more weights: %s", gone)
            self._drop_weights(weights)

    def _apply(self, update: WeightUpdate) -> None:
        """Verifies, then overwrites the model, then acknowledges; a damaged update is refused and changes nothing."""
        try:
            expected = flat_nbytes(self.engine.model)
            if update.buffer.nbytes != expected:
                raise WeightsFault(f"{update.buffer.nbytes} bytes of weights, but the model has {expected}")
            update.verify()
        except WeightsFault as fault:
            logger.error("weights refused: %s", fault)
            update.reject(str(fault))
            return
        read_flat(self.engine.model, update.buffer)
        self.engine.weights_changed(update.version)
        self.checksum = update.checksum
        update.ack()

    def _drop_weights(self, weights: WeightSubscriber) -> None:
        self._poll.unregister(weights)
        self._weights = None
        weights.close()


def model_checksum(model: nn.Module) -> str:
    """The checksum that published weights equal to the model's would carry, without building the flat buffer.

    Of the sum of 8-byte words, float32 values at even places of the flat buffer are the low halves.
    """
    halves = [0, 0]
    at = 0
    for parameter in model.parameters():
        words = parameter.detach().float().contiguous().view(-1).numpy().view(np.uint32)
        for place in (0, 1):
            halves[(at + place) % 2] += int(words[place::2].sum(dtype=np.uint64))
        at += len(words)
    return f"{(halves[0] + (halves[1] << 32)) % 2**64:016x}"
