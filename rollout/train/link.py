"""The engine's end of the line to the learner: frames out, messages in.

Invariant: the newest of each message is kept, waits end with a fault when the learner reports an
error or goes away, and one task alone (`pump`) reads the socket.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from rollout.errors import LearnerFault
from rollout.lane.batch import FrameParts
from rollout.lane.control import CheckpointSaved, Finish, Hello, LearnerError, LearnerMessage, Published, StepDone
from rollout.lane.errors import PeerGone
from rollout.lane.writer import LaneWriter

PEER_REPORT_S = 2.0
LEARNER_SAYS = "the learner reports: "
"""Begins the fault that carries the learner's own last words: the root cause, where there are some."""


class LearnerLink:
    """What the training loop knows of the learner.

    Args:
        writer: the open lane.
        observe: called with every message, on the loop; must not block.
    """

    def __init__(self, writer: LaneWriter, observe: Callable[[LearnerMessage], None]) -> None:
        self._writer = writer
        self._observe = observe
        self._changed = anyio.Condition()
        self.hello: Hello | None = None
        self.weight_version = -1
        """Newest published version; -1 before the first broadcast."""
        self.sft_steps_done = 0
        self.steps_done = 0
        """RL steps done."""
        self.published_step = -1
        """RL steps contained in the newest published weights."""
        self.finished = False
        self._num_checkpoints = 0
        self.on_published: Callable[[int], None] = lambda step: None
        """Called with the number of RL steps that newly published weights contain."""

    async def pump(self) -> None:
        """Reads messages until the learner is finished; run it in a task group."""
        while not self.finished:
            try:
                message = await self._writer.receive()
            except PeerGone:
                # Whoever watches the process knows how it ended: its report goes first.
                await anyio.sleep(PEER_REPORT_S)
                raise
            self._apply(message)
            self._observe(message)
            async with self._changed:
                self._changed.notify_all()

    async def write(self, frames: list[FrameParts]) -> None:
        """Sends one step's frames; suspends while the lane is full."""
        for frame in frames:
            await self._writer.write(frame)

    async def finish(self, timeout_s: float) -> None:
        """Asks the learner to save a checkpoint and end, and waits for that checkpoint."""
        saved = self._num_checkpoints
        await self._writer.send(Finish())
        await self.wait_until(lambda: self._num_checkpoints > saved, "the last checkpoint", timeout_s)
        self.finished = True

    async def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Waits for a condition on this object's attributes.

        Raises:
            LearnerFault: `timeout_s` passed first.
        """
        with anyio.move_on_after(timeout_s) as scope:
            async with self._changed:
                while not condition():
                    await self._changed.wait()
        if scope.cancelled_caught:
            raise LearnerFault(f"waited {timeout_s:g} s for {what} from the learner")

    def _apply(self, message: LearnerMessage) -> None:
        match message:
            case Hello():
                self.hello = message
                self.sft_steps_done = message.phase_steps_sft
                self.steps_done = message.step
            case StepDone(kind="sft"):
                self.sft_steps_done = message.step + 1
            case StepDone():
                self.steps_done = message.step + 1
            case Published():
                self.weight_version = message.weight_version
                self.published_step = message.step
                self.on_published(message.step)
            case CheckpointSaved():
                self._num_checkpoints += 1
            case LearnerError():
                raise LearnerFault(f"{LEARNER_SAYS}{message.message}")
