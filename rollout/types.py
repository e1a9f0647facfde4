"""What flows through the engine: turns, trajectories, verdicts, groups.

Invariants: all of it is immutable once made; a trajectory's columns have one entry per token and
its `token_ids` are exactly what was sent to and sampled from the policy server; every text that a program
or a policy had a say in is well-formed, so whatever writes these structs down never meets a text that is no UTF-8.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


def well_formed(text: str) -> str:
    """The text itself, or with its lone surrogates, which no UTF-8 can hold, written as `\\ud800`."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class _Texts(msgspec.Struct, frozen=True):
    """Makes the texts of a struct, and those in its tuples, well-formed when it is made."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if type(value) is str and not value.isascii():
                msgspec.structs.force_setattr(self, name, well_formed(value))
            elif type(value) is tuple and any(type(item) is str and not item.isascii() for item in value):
                fixed = tuple(well_formed(item) if type(item) is str else item for item in value)
                msgspec.structs.force_setattr(self, name, fixed)


class StopReason(StrEnum):
    """Why an episode ended. All but `FAULT` are outcomes that can be trained or masked."""

    SUBMITTED = "submitted"
    """Single-turn: the action was the submission. Multi-turn: the visible tests passed."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The action or the context hit its token budget."""
    TIMEOUT = "timeout"
    """The episode's deadline passed."""
    FAULT = "fault"
    """No outcome: a fault of ours ended it, after every retry. The reward is `Invalid`."""


STOP_REASON_CODES: dict[StopReason, int] = {reason: code for code, reason in enumerate(StopReason)}
"""Stable wire codes of the lane's `stop_reason u8` column; append only."""


class Invalid(_Texts, frozen=True, tag="invalid"):
    """No reward could be known: a fault of ours. Masked out of group statistics."""

    reason: str


class Reward(msgspec.Struct, frozen=True, tag="reward"):
    """A reward that was earned, in [0, 1] for the built-in rules."""

    value: float


class TestResult(_Texts, frozen=True, kw_only=True):
    """One test of one layer."""

    name: str
    passed: bool
    detail: str = ""
    """Why it failed, bounded; for visible tests this is what the policy reads."""


class LayerVerdict(_Texts, frozen=True, kw_only=True):
    """What one verification layer found."""

    layer: str
    """`visible`, `hidden`, …"""
    passed: bool
    score: float
    """Fraction of its tests that passed, in [0, 1]."""
    num_tests: int
    num_passed: int
    evidence: str = ""
    """Bounded text: the first failure, or the outcome's reason (`timeout`, `oom`, …)."""
    wall_s: float = 0.0
    tests: tuple[TestResult, ...] = ()
    version: int = 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of one submission: every layer, and the reward they make."""

    task_id: str
    reward: Reward | Invalid
    layers: tuple[LayerVerdict, ...] = ()

    def layer(self, name: str) -> LayerVerdict | None:
        """The verdict of the named layer, or None when it did not run."""
        return next((layer for layer in self.layers if layer.layer == name), None)


class CommandRecord(_Texts, frozen=True, kw_only=True):
    """One command that an action executed, as it is journaled (texts capped)."""

    argv: tuple[str, ...]
    reason: str
    exit_code: int | None
    signal: int | None
    wall_s: float
    cpu_s: float
    peak_memory_bytes: int
    stdout: str
    stderr: str
    truncated_bytes: int


class Turn(_Texts, frozen=True, kw_only=True):
    """One action and the observation after it."""

    action: str
    """Decoded text of the sampled tokens."""
    submission: str | None
    """The program extracted from the action; None where it holds none."""
    observation: str
    """What the policy is shown next; empty after the last turn."""
    finish_reason: str
    """The policy server's own word: `stop`, `length`, `abort`."""
    num_action_tokens: int
    commands: tuple[CommandRecord, ...] = ()
    visible: LayerVerdict | None = None


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a trajectory that were sampled under one weight version."""

    start: int
    end: int
    version: int


class Trajectory(_Texts, frozen=True, kw_only=True):
    """The immutable record of a finished episode.

    `token_ids`, `loss_mask` and `logprobs` are columns of equal length T; `logprobs` is 0.0 where
    `loss_mask` is False. Logprobs are in nats, after temperature.
    """

    trajectory_id: str
    """`<group_id>/<sibling index>/<attempt>`"""
    task_id: str
    group_id: int
    sibling: int
    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]
    temperature: float
    turns: tuple[Turn, ...]
    verdict: Verdict
    stop_reason: StopReason
    wall_s: float = 0.0
    seed: int = 0
    """Of the first turn's request; 0 when the server drew freely."""
    turn_rewards: tuple[float | None, ...] = ()
    """One per turn: 1.0 or 0.0 for visible tests passed or failed after a turn that was not the
    last; the verdict's reward for the last one. None where it is unknown."""
    faults: tuple[str, ...] = ()
    """Root causes of the attempts of this sample that failed before this one."""

    @property
    def reward(self) -> Reward | Invalid:
        """The verdict's reward."""
        return self.verdict.reward

    @property
    def oldest_version(self) -> int | None:
        """Smallest weight version of any sampled token; None without sampled tokens."""
        return min((span.version for span in self.spans), default=None)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All siblings of one task, complete. `advantages[i]` belongs to `trajectories[i]`."""

    group_id: int
    task_id: str
    trajectories: tuple[Trajectory, ...]
    advantages: tuple[float, ...] = ()


class DroppedGroup(_Texts, frozen=True, kw_only=True):
    """A group that left without being delivered, and why."""

    group_id: int
    task_id: str
    reason: str
