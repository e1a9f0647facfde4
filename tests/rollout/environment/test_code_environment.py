"""The code environment: malformed actions are observations, evidence is bounded, hidden tests stay hidden."""

from __future__ import annotations

import pytest
from engine_fakes import RENDERER, FakeVerifier, collect, layer, make_engine, make_task, scripted

from rollout.environment.code import NO_PROGRAM, CodeEnvironment, CodeEnvironmentConfig, failure_text, shorten
from rollout.environment.types import Reaction
from rollout.errors import ConfigError, SandboxFault
from rollout.tasks.types import Task
from rollout.types import StopReason
from sandbox.errors import StartError

pytestmark = pytest.mark.anyio


async def act(action: str, *, last: bool = False, runner: FakeVerifier | None = None) -> Reaction:
    async with CodeEnvironment(runner or FakeVerifier()).open(make_task(max_turns=3)) as live:
        return await live.act(action, last=last)


async def test_a_single_turn_is_a_submission_and_runs_nothing() -> None:
    runner = FakeVerifier()
    reaction = await act("```python\nright\n```", last=True, runner=runner)
    assert reaction == Reaction(done=True, submission="right\n")
    assert runner.num_visible == 0


async def test_a_program_that_passes_its_visible_tests_ends_the_episode() -> None:
    reaction = await act("right")
    assert reaction.done
    assert reaction.visible is not None
    assert reaction.visible.passed


async def test_a_failure_is_told_with_its_error_text() -> None:
    reaction = await act("bug")
    assert not reaction.done
    assert "ValueError: bug is not the answer" in reaction.observation
    assert "0 of 1 visible tests passed" in reaction.observation


@pytest.mark.parametrize("action", ["", "   \n", "```python\n```"])
async def test_an_action_without_a_program_is_an_observation(action: str) -> None:
    assert await act(action) == Reaction(done=False, observation=NO_PROGRAM)


async def test_a_failing_sandbox_is_a_fault_and_no_observation() -> None:
    class Broken(FakeVerifier):
        async def run_visible(self, task: Task, submission: str):  # type: ignore[no-untyped-def]
            raise StartError("no jail")

    with pytest.raises(SandboxFault, match="no jail"):
        await act("bug", runner=Broken())


async def test_evidence_is_bounded_head_and_tail() -> None:
    text = failure_text(layer("visible", False, "x" * 50_000 + "the end"), 1_000)
    assert len(text) < 1_300
    assert "the end" in text
    assert "left out" in text
    assert shorten("short", 100) == "short"


async def test_turns_come_from_the_task_unless_configured() -> None:
    task = make_task(max_turns=3)
    assert CodeEnvironment(FakeVerifier()).max_turns(task) == 3
    assert CodeEnvironment(FakeVerifier(), CodeEnvironmentConfig(max_turns=7)).max_turns(task) == 7
    blind = Task(id="a/b", prompt="?", limits=task.limits)
    assert CodeEnvironment(FakeVerifier()).max_turns(blind) == 1
    with pytest.raises(ConfigError):
        CodeEnvironmentConfig(max_turns=0)


async def test_the_error_of_the_first_turn_reaches_the_second_request() -> None:
    verifier = FakeVerifier()
    engine = make_engine(scripted("wrong", "oracle"), environment=CodeEnvironment(verifier), verifier=verifier)
    (group,) = await collect(engine, [make_task(max_turns=2)])
    trajectory = group.trajectories[0]
    assert trajectory.turn_rewards == (0.0, 1.0)
    assert trajectory.stop_reason is StopReason.SUBMITTED
    assert "ValueError: bug is not the answer" in RENDERER.decode(trajectory.token_ids)


async def test_a_malformed_answer_does_not_erase_an_earlier_program() -> None:
    class Sampler:
        async def sample(self, request):  # type: ignore[no-untyped-def]
            role = "wrong" if request.origin.turn == 0 else "noop"
            action = await scripted(role).sample(request)
            if role == "noop":
                ids = RENDERER.encode_action("  ")
                spans = (type(action.spans[0])(0, len(ids), 0),)
                return type(action)(token_ids=ids, logprobs=[0.0] * 3, finish_reason="stop", spans=spans)
            return action

    verifier = FakeVerifier()
    engine = make_engine(Sampler(), environment=CodeEnvironment(verifier), verifier=verifier, group_size=1)
    (group,) = await collect(engine, [make_task(max_turns=3)])
    turns = group.trajectories[0].turns
    assert [turn.submission for turn in turns] == ["bug\n", None, None]
    assert turns[1].observation == NO_PROGRAM
    assert verifier.num_verdicts == 1
