"""One episode: turns, budgets, stop reasons and the token record."""

from __future__ import annotations

import random

import pytest
from engine_fakes import RENDERER, FakeEnvironment, HangingSampler, collect, make_engine, make_task, scripted

from rollout.engine.record import TokenRecord
from rollout.errors import SandboxFault
from rollout.rendering.bytes import EOS
from rollout.sampler.types import Action
from rollout.types import Reward, StopReason, Trajectory, VersionSpan
from sandbox.errors import StartError


async def one(sampler=None, task=None, **overrides) -> Trajectory:  # type: ignore[no-untyped-def]
    groups = await collect(make_engine(sampler, group_size=1, **overrides), [task or make_task()])
    return groups[0].trajectories[0]


@pytest.mark.anyio
async def test_what_was_sampled_is_what_is_recorded_and_nothing_else_is_trained() -> None:
    trajectory = await one(scripted("wrong", "oracle"), make_task(max_turns=3))
    actions = [RENDERER.encode_action(turn.action) for turn in trajectory.turns]
    observation = RENDERER.observation("it failed", closed=True)
    expected = [*RENDERER.prompt(make_task()), *actions[0], *observation, *actions[1]]
    assert trajectory.token_ids == expected
    trained = [t for t, trains in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if trains]
    assert trained == [*actions[0], *actions[1]]
    assert [span.version for span in trajectory.spans] == [0, 0]


@pytest.mark.anyio
async def test_a_failed_turn_is_observed_and_the_turn_rewards_are_zero_then_one() -> None:
    trajectory = await one(scripted("wrong", "oracle"), make_task(max_turns=3))
    assert [turn.observation for turn in trajectory.turns] == ["it failed", ""]
    assert trajectory.turn_rewards == (0.0, 1.0)
    assert trajectory.stop_reason is StopReason.SUBMITTED
    assert trajectory.reward == Reward(1.0)


@pytest.mark.anyio
async def test_turns_that_are_used_up_end_the_episode_and_the_last_program_is_judged() -> None:
    trajectory = await one(scripted("wrong"), make_task(max_turns=3))
    assert len(trajectory.turns) == 3
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.turn_rewards == (0.0, 0.0, 0.0)


@pytest.mark.anyio
async def test_an_action_cut_by_its_token_budget_is_closed_once_and_the_close_is_masked() -> None:
    trajectory = await one(scripted("wrong"), make_task(max_turns=2), max_tokens=5)
    prompt = len(RENDERER.prompt(make_task()))
    assert [turn.finish_reason for turn in trajectory.turns] == ["length", "length"]
    assert trajectory.token_ids[prompt + 5] == EOS
    assert trajectory.loss_mask[prompt : prompt + 6] == [True] * 5 + [False]
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


@pytest.mark.anyio
async def test_a_context_without_room_for_the_observation_ends_the_episode_before_it() -> None:
    room = len(RENDERER.prompt(make_task())) + 25
    trajectory = await one(scripted("wrong"), make_task(max_turns=5), max_context_tokens=room)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert len(trajectory.token_ids) <= room
    assert trajectory.turns[-1].observation == ""


@pytest.mark.anyio
async def test_a_deadline_is_an_outcome_that_keeps_what_was_sampled() -> None:
    environment = FakeEnvironment(delay_s=60)
    trajectory = await one(scripted("oracle"), make_task(episode_timeout_s=0.05), environment=environment)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert sum(trajectory.loss_mask) == len(RENDERER.encode_action(trajectory.turns[0].action))
    assert trajectory.reward == Reward(0.0)
    assert environment.num_open == 0


@pytest.mark.anyio
async def test_a_deadline_before_the_first_action_is_a_timeout_without_turns() -> None:
    trajectory = await one(HangingSampler(), make_task(episode_timeout_s=0.05))
    assert (trajectory.stop_reason, trajectory.turns, trajectory.turn_rewards) == (StopReason.TIMEOUT, (), ())


@pytest.mark.anyio
async def test_a_sandbox_that_fails_under_the_verifier_is_a_fault_and_the_sample_is_refilled() -> None:
    failures = [StartError("no jail")]

    def fault(task, number):  # type: ignore[no-untyped-def]
        if failures:
            raise failures.pop()

    from engine_fakes import FakeVerifier

    trajectory = await one(verifier=FakeVerifier(fault))
    assert trajectory.reward == Reward(1.0)
    assert "no jail" in trajectory.faults[0]


@pytest.mark.anyio
async def test_an_environment_fault_never_reaches_the_policy() -> None:
    class Failing(FakeEnvironment):
        failed = False

        async def act(self, action: str, *, last: bool):  # type: ignore[no-untyped-def]
            if not Failing.failed:
                Failing.failed = True
                raise SandboxFault("the sandbox died")
            return await super().act(action, last=last)

    trajectory = await one(scripted("wrong", "oracle"), make_task(max_turns=2), environment=Failing())
    assert "sandbox died" not in RENDERER.decode(trajectory.token_ids)
    assert "sandbox died" in trajectory.faults[0]


def test_a_record_keeps_every_token_of_a_thousand_random_conversations() -> None:
    rng = random.Random(1)
    for _ in range(1_000):
        prompt = [rng.randrange(1_000) for _ in range(rng.randrange(1, 20))]
        record, expected, trained = TokenRecord(prompt), list(prompt), [False] * len(prompt)
        for turn in range(rng.randrange(1, 6)):
            ids = [rng.randrange(1_000) for _ in range(rng.randrange(1, 20))]
            span = VersionSpan(0, len(ids), turn // 2)
            record.append_action(Action(token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", spans=(span,)))
            observed = [rng.randrange(1_000) for _ in range(rng.randrange(5))]
            record.append_observation(observed)
            expected += [*ids, *observed]
            trained += [True] * len(ids) + [False] * len(observed)
        columns = record.columns()
        assert (columns.token_ids, columns.loss_mask) == (expected, trained)
        covered = [False] * len(expected)
        for part in columns.spans:
            covered[part.start : part.end] = [True] * (part.end - part.start)
        assert covered == trained


def test_neighbouring_spans_of_one_version_are_joined_and_others_are_not() -> None:
    record = TokenRecord([1])
    spans = (VersionSpan(0, 1, 3), VersionSpan(1, 2, 4))
    record.append_action(Action(token_ids=[5, 6], logprobs=[-1, -1], finish_reason="length", spans=spans))
    record.append_action(Action(token_ids=[7], logprobs=[-1], finish_reason="stop", spans=(VersionSpan(0, 1, 4),)))
    assert record.columns().spans == (VersionSpan(1, 2, 3), VersionSpan(2, 4, 4))


def test_a_record_that_was_changed_behind_its_back_is_not_handed_out() -> None:
    record = TokenRecord([1, 2, 3])
    record._token_ids[1] = 9
    with pytest.raises(AssertionError, match="prefix"):
        record.columns()
