"""What a journal holds: one tagged struct per kind of record.

Invariant: kinds and fields are only ever added, with defaults, so that old journals stay readable.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from rollout.engine.evaluate import EvalReport
from rollout.types import DroppedGroup, Group

FORMAT_VERSION = 1


class RunHeader(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """Written whenever a process opens the run directory to write."""

    started_unix_s: float
    command: str = ""
    config_json: str = ""
    """The resolved configuration."""
    format_version: int = FORMAT_VERSION


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True, tag="group"):
    """A finished group, with everything that its rewards were computed from."""

    group: Group
    purpose: Literal["train", "eval"] = "train"


class DroppedRecord(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """A group that left without trajectories."""

    dropped: DroppedGroup
    purpose: Literal["train", "eval"] = "train"


class DeliveredRecord(msgspec.Struct, frozen=True, kw_only=True, tag="delivered"):
    """A group was given its place in the stream to the learner.

    Its trajectories have the delivery sequence numbers [seq_start, seq_end), in sibling order.
    """

    group_id: int
    seq_start: int
    seq_end: int
    step: int
    """The optimizer step that consumes it."""


class EvalRecord(msgspec.Struct, frozen=True, kw_only=True, tag="eval"):
    """An evaluation's result."""

    report: EvalReport


class PhaseRecord(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """A phase of the run began or ended (`sft`, `rl`, …)."""

    name: str
    event: Literal["begin", "end"]
    unix_s: float
    step: int = 0


class WeightRecord(msgspec.Struct, frozen=True, kw_only=True, tag="weights"):
    """The policy server runs with these weights from now on."""

    weight_version: int
    step: int
    unix_s: float = 0.0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The learner finished an optimizer step."""

    step: int
    kind: Literal["sft", "rl"]
    metrics: dict[str, float] = {}


Record: TypeAlias = (
    RunHeader | GroupRecord | DroppedRecord | DeliveredRecord | EvalRecord | PhaseRecord | WeightRecord | StepRecord
)
