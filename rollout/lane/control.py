"""The typed messages between engine and learner; they share the lane's socket.

Invariant: bounded, JSON, one per packet. `EngineMessage` goes to the learner, `LearnerMessage` to the
engine; `LaneOpen` and `LargeFrame` carry descriptors and are handled inside the lane.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rollout.lane.channel import Message

MAX_TEXT = 8000
"""Characters of free text in one message."""


class Hello(Message, frozen=True, kw_only=True):
    """learner → engine, first message: where training stands, fresh or restored."""

    phase_steps_sft: int
    """SFT steps done; the next SFT frame must be of this step."""
    step: int
    """RL steps done; the next RL frame must be of this step."""
    next_delivery_seq: int
    """First `delivery_seq` that has not been trained on."""
    weight_version: int
    """Newest version ever published; the coming broadcast gets the next one."""


class StepDone(Message, frozen=True, kw_only=True):
    """learner → engine: an optimizer step is done (before its weights are published)."""

    step: int
    kind: Literal["sft", "rl"]
    metrics: dict[str, float]


class Published(Message, frozen=True, kw_only=True):
    """learner → engine: the policy server samples with these weights from now on."""

    weight_version: int
    step: int
    """RL steps done when these weights were made."""


class CheckpointSaved(Message, frozen=True, kw_only=True):
    """learner → engine: this file survives a crash."""

    step: int
    path: str


class LearnerError(Message, frozen=True, kw_only=True):
    """learner → engine, last message: why the learner ends."""

    message: str


class PublishNow(Message, frozen=True, kw_only=True):
    """engine → learner: publish the present weights once more, as a new version."""


class Finish(Message, frozen=True, kw_only=True):
    """engine → learner: save a checkpoint and exit 0. Frames already in the lane are trained first."""


class LaneOpen(Message, frozen=True, kw_only=True):
    """engine → learner, first message: the slab, and the `ready` and `free` eventfds."""

    num_fds: ClassVar[int] = 3
    abi: int
    num_slots: int
    slot_bytes: int
    epoch: int


class LargeFrame(Message, frozen=True, kw_only=True):
    """engine → learner: a one-shot memfd that holds frame `seq`, too large for a slot."""

    num_fds: ClassVar[int] = 1
    seq: int
    nbytes: int


EngineMessage = PublishNow | Finish | LaneOpen | LargeFrame
LearnerMessage = Hello | StepDone | Published | CheckpointSaved | LearnerError
