"""Runs over fakes: every admitted group leaves exactly once, whatever happens."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest
from engine_fakes import (
    FakeEnvironment,
    FakeVerifier,
    FaultySampler,
    HangingSampler,
    collect,
    make_engine,
    make_task,
    scripted,
)

from rollout.engine.stream import GroupStream, RunOptions
from rollout.errors import RunFault, SamplerFault
from rollout.tasks.types import Task
from rollout.types import DroppedGroup, Group, Invalid, Reward, StopReason

pytestmark = pytest.mark.anyio


async def drain(stream: GroupStream, into: list[Group | DroppedGroup]) -> None:
    async for group in stream:
        into.append(group)


async def test_every_task_comes_back_as_one_group_with_all_siblings() -> None:
    tasks = [make_task(str(i)) for i in range(50)]
    groups = await collect(make_engine(), tasks)
    assert sorted(group.task_id for group in groups) == sorted(task.id for task in tasks)
    assert len({group.group_id for group in groups}) == 50
    assert all([t.sibling for t in group.trajectories] == [0, 1] for group in groups)
    assert all(t.reward == Reward(1.0) for group in groups for t in group.trajectories)


async def test_tasks_may_come_from_an_asynchronous_source() -> None:
    async def source() -> AsyncIterator[Task]:
        for i in range(5):
            yield make_task(str(i))

    async with make_engine() as engine:
        groups = [group async for group in engine.run(source())]
    assert len(groups) == 5


async def test_one_failing_sample_is_refilled_and_its_siblings_are_untouched() -> None:
    def fault(number: int) -> SamplerFault | None:
        return SamplerFault("reset") if number == 0 else None

    (group,) = await collect(make_engine(FaultySampler(scripted("oracle"), fault), group_size=4), [make_task()])
    assert [t.reward for t in group.trajectories] == [Reward(1.0)] * 4
    assert sorted(len(t.faults) for t in group.trajectories) == [0, 0, 0, 1]
    (refilled,) = [t for t in group.trajectories if t.faults]
    assert refilled.trajectory_id.endswith("/1")
    assert "reset" in refilled.faults[0]


async def test_a_sample_that_keeps_failing_is_masked_and_leaves_the_statistics_alone() -> None:
    class Sampler:
        async def sample(self, request):  # type: ignore[no-untyped-def]
            if request.origin.sibling == 1:
                raise SamplerFault("it is down")
            role = "oracle" if request.origin.sibling == 0 else "wrong"
            return await scripted(role).sample(request)

    engine = make_engine(Sampler(), group_size=4, max_fault_fraction=1.0)
    (group,) = await collect(engine, [make_task()])
    assert isinstance(group.trajectories[1].reward, Invalid)
    assert group.trajectories[1].stop_reason is StopReason.FAULT
    assert "it is down" in group.trajectories[1].reward.reason
    assert len(group.trajectories[1].faults) == 3
    assert group.advantages == pytest.approx((2 / 3, 0.0, -1 / 3, -1 / 3))


async def test_a_verdict_that_could_not_be_made_masks_the_sample_and_is_no_reward_of_zero() -> None:
    verifier = FakeVerifier(lambda task, number: "the judge is down" if number == 0 else None)
    (group,) = await collect(make_engine(verifier=verifier, group_size=3, max_fault_fraction=1.0), [make_task()])
    invalid = [t for t in group.trajectories if isinstance(t.reward, Invalid)]
    assert len(invalid) == 1
    assert sum(group.advantages) == 0


async def test_a_group_without_any_reward_is_dropped_with_its_cause() -> None:
    engine = make_engine(FaultySampler(scripted("oracle"), lambda number: SamplerFault("down")), min_fault_attempts=99)
    (group,) = await collect(engine, [make_task()])
    assert isinstance(group, DroppedGroup)
    assert "down" in group.reason


async def test_a_prompt_that_fills_the_context_drops_the_group_before_anything_runs() -> None:
    (group,) = await collect(make_engine(max_context_tokens=10), [make_task()])
    assert isinstance(group, DroppedGroup)
    assert "prompt" in group.reason


async def test_too_many_faults_stop_the_run_with_the_root_cause_and_no_group_is_missing() -> None:
    def fault(number: int) -> SamplerFault | None:
        return SamplerFault("the server is gone") if number >= 20 else None

    seen: list[Group | DroppedGroup] = []
    async with make_engine(FaultySampler(scripted("oracle"), fault)) as engine:
        with pytest.raises(RunFault, match="the server is gone") as caught:
            await drain(engine.run(make_task(str(i)) for i in itertools.count()), seen)
        assert engine.metrics.groups_admitted == len(seen)
    assert isinstance(caught.value.__cause__, SamplerFault)
    assert sorted(group.group_id for group in seen) == list(range(len(seen)))


async def test_no_more_groups_are_admitted_than_the_window_holds() -> None:
    drawn = []

    def source():  # type: ignore[no-untyped-def]
        for i in itertools.count():
            drawn.append(i)
            yield make_task(str(i))

    async with make_engine(groups_per_batch=3, max_staleness=1) as engine:
        stream = engine.run(source(), RunOptions(hold=True))
        for _ in range(6):
            await anext(stream)
        await anyio.wait_all_tasks_blocked()
        assert (len(drawn), stream.num_outstanding) == (6, 6)
        stream.release(3)
        for _ in range(3):
            await anext(stream)
        await anyio.wait_all_tasks_blocked()
        assert (len(drawn), stream.num_outstanding) == (9, 6)


async def test_a_dropped_group_gives_its_slot_back_without_a_release() -> None:
    async with make_engine(groups_per_batch=1, max_context_tokens=10) as engine:
        stream = engine.run([make_task(str(i)) for i in range(5)], RunOptions(hold=True))
        assert len([group async for group in stream]) == 5


async def test_a_slow_consumer_bounds_what_waits_for_it() -> None:
    async with make_engine(groups_per_batch=2) as engine:
        stream = engine.run(make_task(str(i)) for i in itertools.count())
        await anext(stream)
        await anyio.wait_all_tasks_blocked()
        assert engine.metrics.groups_admitted <= 3


async def test_stopping_turns_what_is_in_flight_into_dropped_groups() -> None:
    sampler, environment = HangingSampler(), FakeEnvironment()
    async with make_engine(sampler, environment=environment) as engine:
        stream = engine.run([make_task(str(i)) for i in range(3)])
        await sampler.started.wait()
        await anyio.wait_all_tasks_blocked()
        stream.stop("enough")
        groups = [group async for group in stream]
    assert [group.reason for group in groups] == ["enough"] * 3
    assert environment.num_open == 0


async def test_leaving_the_engine_cancels_every_request_and_environment() -> None:
    sampler, environment = HangingSampler(), FakeEnvironment()
    with anyio.fail_after(5):
        async with make_engine(sampler, environment=environment) as engine:
            engine.run([make_task()])
            await sampler.started.wait()
    assert sampler.num_cancelled >= 1
    assert environment.num_open == 0


async def test_an_error_of_the_caller_passes_through_the_engine_unwrapped() -> None:
    async def consume() -> None:
        async with make_engine() as engine:
            async for _ in engine.run([make_task()]):
                raise KeyError("mine")

    with pytest.raises(KeyError):
        await consume()


async def test_a_bug_in_a_part_crashes_the_engine_and_is_not_a_fault() -> None:
    class Broken:
        async def sample(self, request):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await collect(make_engine(Broken()), [make_task()])


async def test_episodes_alive_at_once_are_bounded() -> None:
    peak = 0

    class Sampler:
        async def sample(self, request):  # type: ignore[no-untyped-def]
            nonlocal peak
            peak = max(peak, engine.metrics.episodes_live)
            await anyio.lowlevel.checkpoint()
            return await scripted("oracle").sample(request)

    engine = make_engine(Sampler(), group_size=8, groups_per_batch=8, max_episodes=5)
    groups = await collect(engine, [make_task(str(i)) for i in range(8)])
    assert len(groups) == 8
    assert peak == 5


async def test_groups_are_salted_with_the_weight_version_at_their_start() -> None:
    salts = []

    class Sampler:
        async def sample(self, request):  # type: ignore[no-untyped-def]
            salts.append(request.cache_salt)
            return await scripted("oracle").sample(request)

    async with make_engine(Sampler(), group_size=1) as engine:
        engine.weight_version = 7
        groups = [group async for group in engine.run([make_task()])]
    assert isinstance(groups[0], Group)
    assert salts == ["v7"]


async def test_request_seeds_differ_between_siblings_and_repeat_between_runs() -> None:
    async def seeds(purpose: str) -> list[int | None]:
        found: list[int | None] = []

        class Sampler:
            async def sample(self, request):  # type: ignore[no-untyped-def]
                found.append(request.seed)
                return await scripted("oracle").sample(request)

        await collect(make_engine(Sampler(), group_size=4), [make_task("a"), make_task("b")], purpose=purpose)
        return found

    first = await seeds("train")
    assert len(set(first)) == 8
    assert sorted(first) == sorted(await seeds("train"))  # type: ignore[type-var]
    assert set(first).isdisjoint(await seeds("eval"))


@pytest.mark.parametrize("limit", [1, 7])
async def test_a_run_that_only_drops_groups_stops_with_the_last_reason(limit: int) -> None:
    seen: list[Group | DroppedGroup] = []
    async with make_engine(max_context_tokens=10, max_dropped_in_a_row=limit) as engine:
        with anyio.fail_after(5), pytest.raises(RunFault, match=f"{limit} groups in a row.*task fake/.*its prompt has"):
            await drain(engine.run((make_task(str(i)) for i in itertools.count()), RunOptions(hold=True)), seen)
        assert engine.metrics.groups_admitted == len(seen)
        assert len(seen) >= limit


async def test_a_complete_group_between_dropped_ones_starts_their_count_anew() -> None:
    tasks = [make_task("x" * (300 if i % 3 else 1)) for i in range(30)]
    groups = await collect(make_engine(max_context_tokens=300, max_dropped_in_a_row=3, groups_per_batch=1), tasks)
    assert sum(isinstance(group, DroppedGroup) for group in groups) == 20
