"""Rates, intervals and pass@k against values computed by hand; reports of whole evaluations."""

from __future__ import annotations

import itertools

import anyio
import msgspec
import pytest
from engine_fakes import RENDERER, FakeVerifier, FaultySampler, HangingSampler, make_engine, make_task, scripted

from rollout.engine.evaluate import EvalReport, EvalTally, format_report, pass_at_k, wilson
from rollout.errors import RunFault, SamplerFault
from rollout.types import Reward, Verdict


@pytest.mark.parametrize("num_passed", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(num_passed: int, k: int) -> None:
    samples = [True] * num_passed + [False] * (5 - num_passed)
    draws = list(itertools.combinations(samples, k))
    assert pass_at_k(5, num_passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"), [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0)]
)
def test_the_wilson_interval_has_its_published_values(passed: int, total: int, low: float, high: float) -> None:
    rate = wilson(passed, total)
    assert (rate.low, rate.high) == pytest.approx((low, high), abs=5e-5)


def test_an_interval_without_samples_says_nothing() -> None:
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)


class Mixed:
    """Sibling 0 is right, the others are wrong; tasks named `hard` are never right."""

    async def sample(self, request):  # type: ignore[no-untyped-def]
        right = request.origin.sibling == 0 and "hard" not in request.origin.task.id
        return await scripted("oracle" if right else "wrong").sample(request)


@pytest.mark.anyio
async def test_a_mix_has_exactly_the_expected_rates_per_difficulty() -> None:
    tasks = [make_task(f"easy{i}", difficulty="easy") for i in range(6)]
    tasks += [make_task(f"hard{i}", difficulty="hard") for i in range(2)]
    async with make_engine(Mixed()) as engine:
        report = await engine.evaluate(tasks, 4, temperature=0.5)
    assert (report.hidden.passed, report.hidden.total) == (6, 32)
    assert report.pass_at == {1: pytest.approx(6 / 32), 2: pytest.approx(0.75 * 0.5), 4: pytest.approx(0.75)}
    assert report.mean_reward == pytest.approx(6 / 32)
    assert [(part.name, part.pass_at_1) for part in report.by_difficulty] == [("easy", 0.25), ("hard", 0.0)]
    assert (report.temperature, report.num_invalid) == (0.5, 0)
    assert [row.task_id for row in report.tasks] == [task.id for task in tasks]
    assert msgspec.json.decode(msgspec.json.encode(report), type=EvalReport) == report
    text = format_report(report)
    assert "6 of 32" in text
    assert "easy" in text


@pytest.mark.anyio
async def test_samples_lost_to_faults_are_named_and_are_no_part_of_the_rates() -> None:
    def fault(number: int) -> SamplerFault | None:
        return SamplerFault("gone") if number < 3 else None

    async with make_engine(FaultySampler(scripted("oracle"), fault), max_episodes=1, max_fault_fraction=1) as engine:
        report = await engine.evaluate([make_task("a"), make_task("b")], 2)
    assert (report.num_invalid, report.num_samples) == (1, 3)
    assert report.pass_at_1 == 1.0
    assert "gone" in report.causes[0]
    assert "1 samples lost to faults" in format_report(report)


@pytest.mark.anyio
async def test_tasks_without_visible_tests_are_no_part_of_the_visible_rate() -> None:
    class HiddenOnly(FakeVerifier):
        async def verify(self, task, submission):  # type: ignore[no-untyped-def]
            verdict = await super().verify(task, submission)
            return Verdict(task_id=task.id, reward=Reward(1.0), layers=verdict.layers[1:])

    async with make_engine(verifier=HiddenOnly()) as engine:
        report = await engine.evaluate([make_task()], 2)
    assert (report.visible.total, report.hidden.passed) == (0, 2)
    assert "visible  no such tests" in format_report(report)


@pytest.mark.anyio
async def test_a_cancelled_evaluation_leaves_no_episode_running() -> None:
    sampler = HangingSampler()
    async with make_engine(sampler) as engine:
        with anyio.move_on_after(0.05):
            await engine.evaluate([make_task()], 2)
        await anyio.wait_all_tasks_blocked()
        assert (sampler.num_cancelled, engine.metrics.episodes_live) == (2, 0)


def test_tasks_of_a_report_that_never_came_back_are_not_counted() -> None:
    report = EvalTally([make_task()], 1).report(name="x", temperature=1, weight_version=0, wall_s=0)
    assert (report.num_tasks, report.pass_at_1, report.mean_reward) == (0, 0.0, 0.0)


@pytest.mark.anyio
async def test_evaluations_at_the_same_seed_send_the_same_requests() -> None:
    async def seeds(first_group_id: int) -> set[int | None]:
        found: set[int | None] = set()

        class Sampler:
            async def sample(self, request):  # type: ignore[no-untyped-def]
                found.add(request.seed)
                return await scripted("oracle").sample(request)

        async with make_engine(Sampler(), first_group_id=first_group_id) as engine:
            await engine.evaluate([make_task("a"), make_task("b")], 3)
        return found

    assert len(await seeds(0)) == 6
    assert await seeds(0) == await seeds(99)


def test_the_renderer_of_these_fakes_writes_fenced_programs() -> None:
    assert RENDERER.write_program("x\n") == "```python\nx\n```"


@pytest.mark.anyio
async def test_an_evaluation_of_which_nothing_is_left_is_a_fault_with_its_cause_and_no_rate_of_zero() -> None:
    finished = []
    async with make_engine(max_context_tokens=10, max_dropped_in_a_row=2) as engine:
        with pytest.raises(RunFault, match="evaluation before has no sample with a reward: its prompt has"):
            await engine.evaluate([make_task(str(i)) for i in range(5)], 2, name="before", progress=finished.append)
    assert len(finished) == 5


@pytest.mark.anyio
async def test_an_evaluation_goes_past_tasks_whose_prompts_do_not_fit() -> None:
    tasks = [*(make_task(f"{'x' * 300}{i}") for i in range(4)), make_task("fits")]
    async with make_engine(max_context_tokens=300, max_dropped_in_a_row=2) as engine:
        report = await engine.evaluate(tasks, 1)
    assert (report.num_samples, report.num_invalid, report.pass_at_1) == (1, 4, 1.0)
