"""Texts that a program or a policy had a say in can always be written down."""

from __future__ import annotations

import msgspec
import pytest

from rollout.types import (
    CommandRecord,
    DroppedGroup,
    Invalid,
    LayerVerdict,
    Reward,
    StopReason,
    Trajectory,
    Turn,
    Verdict,
    well_formed,
)
from rollout.types import TestResult as Result

BAD = "ä \ud800 bad \U0001f600"
GOOD = "ä \\ud800 bad \U0001f600"


def trajectory() -> Trajectory:
    tests = (Result(name=BAD, passed=False, detail=BAD),)
    layer = LayerVerdict(layer=BAD, passed=False, score=0.0, num_tests=1, num_passed=0, evidence=BAD, tests=tests)
    command = CommandRecord(
        argv=(BAD, "x"),
        reason="exit",
        exit_code=0,
        signal=None,
        wall_s=0.0,
        cpu_s=0.0,
        peak_memory_bytes=0,
        stdout=BAD,
        stderr=BAD,
        truncated_bytes=0,
    )
    turn = Turn(
        action=BAD,
        submission=BAD,
        observation=BAD,
        finish_reason=BAD,
        num_action_tokens=0,
        commands=(command,),
        visible=layer,
    )
    return Trajectory(
        trajectory_id="0/0/0",
        task_id=BAD,
        group_id=0,
        sibling=0,
        token_ids=[],
        loss_mask=[],
        logprobs=[],
        spans=(),
        temperature=1.0,
        turns=(turn,),
        verdict=Verdict(task_id="t", reward=Reward(0.0), layers=(layer,)),
        stop_reason=StopReason.SUBMITTED,
        faults=(BAD,),
    )


@pytest.mark.parametrize(
    "record",
    [trajectory(), Invalid(BAD), DroppedGroup(group_id=0, task_id="t", reason=BAD)],
    ids=lambda r: type(r).__name__,
)
def test_whatever_texts_hold_they_are_written_and_read_back(record: msgspec.Struct) -> None:
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(record), type=type(record)) == record


def test_lone_surrogates_are_shown_as_escapes_and_all_else_stays() -> None:
    turn = trajectory().turns[0]
    assert (turn.action, turn.submission, turn.commands[0].argv) == (GOOD, GOOD, (GOOD, "x"))
    assert msgspec.structs.replace(turn, observation=BAD).observation == GOOD
    assert well_formed("ä \U0001f600") == "ä \U0001f600"
