"""The pool on a builder of fakes, in virtual time: what it builds, keeps and ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from sandbox.errors import (
    CapabilityError,
    ConfigError,
    StartError,
)
from sandbox.pool.config import Warm
from sandbox.types import MIB, Limits, SandboxSpec
from tests.sandbox.pool.fakes import FakeBuilder, FakeJail, settled, takes, use

pytestmark = pytest.mark.anyio

HOST = SandboxSpec()
PYTHON = SandboxSpec(image="python")
OpenPool = Callable[..., Any]


@pytest.fixture
def anyio_backend(virtual_time: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """These tests run in virtual time."""
    return virtual_time


async def test_a_start_that_is_stuck_for_a_minute_holds_up_nobody(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async def build(number: int, _key: object) -> None:
        await anyio.sleep(60.0 if number == 3 else 0.01)

    builder.on_build = build
    done: list[float] = []

    async def one() -> None:
        await use(pool, HOST, 0.1)
        done.append(anyio.current_time())

    async with open_pool(max_leased=128, max_building=8) as pool:
        started_s = anyio.current_time()
        async with anyio.create_task_group() as group:
            for _ in range(101):
                group.start_soon(one)
        assert max(done) - started_s < 0.5, "also who first asked for the stuck one has got another"
        assert pool.statistics().building == 1
    assert builder.jails == {}


async def test_a_kind_of_which_all_starts_are_stuck_does_not_hold_up_another(
    builder: FakeBuilder, open_pool: OpenPool
) -> None:
    async def build(_number: int, key: Any) -> None:
        if key.image == "python":
            await anyio.sleep(60)
            raise StartError("the jail was not ready after 60 s")

    builder.on_build = build
    async with open_pool(max_leased=128, max_building=4, slow_build_s=2.0, build_retries=0) as pool:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(use, pool, PYTHON)
            await anyio.sleep(10)
            assert pool.statistics().slow >= 4
            started_s = anyio.current_time()
            async with anyio.create_task_group() as others:
                for _ in range(50):
                    others.start_soon(use, pool, HOST, 0.0)
            assert anyio.current_time() - started_s <= 2.1
            group.cancel_scope.cancel()


async def test_a_lone_acquire_whose_build_is_stuck_gets_another(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async def build(number: int, _key: object) -> None:
        await anyio.sleep(0.01 if number else 60.0)

    builder.on_build = build
    async with open_pool(slow_build_s=2.0) as pool:
        started_s = anyio.current_time()
        await use(pool, HOST, 0.0)
        assert anyio.current_time() - started_s == pytest.approx(2.01)
        assert pool.statistics().slow == 1


async def test_building_is_tried_again_with_growing_pauses(builder: FakeBuilder, open_pool: OpenPool) -> None:
    tried_s: list[float] = []

    async def build(number: int, _key: object) -> None:
        tried_s.append(anyio.current_time())
        if number < 3:
            raise StartError("not this time")

    builder.on_build = build
    async with open_pool(first_pause_s=0.1) as pool:
        await use(pool, HOST)
        pauses = [round(after - before, 6) for before, after in itertools.pairwise(tried_s)]
        assert pauses == [0.1, 0.2, 0.4]
        assert pool.statistics().build_failures == 3


async def test_after_the_retries_the_fault_is_the_callers(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async def build(number: int, _key: object) -> None:
        raise StartError(f"number {number}")

    builder.on_build = build
    async with open_pool(build_retries=2) as pool:
        with pytest.raises(StartError, match="number 2"):
            await use(pool, HOST)
        now = pool.statistics()
        assert (now.failed, now.build_failures, now.promised_pids, now.waiting) == (1, 3, 0, 0)


@pytest.mark.parametrize("fault", [ConfigError("spec.image", "x", "there is none"), CapabilityError("a", "b")])
async def test_what_can_never_be_built_is_not_tried_again(
    builder: FakeBuilder, open_pool: OpenPool, fault: Exception
) -> None:
    async def build(_number: int, _key: object) -> None:
        await anyio.sleep(0.1)
        raise fault

    builder.on_build = build
    async with open_pool(max_building=1) as pool:
        faults: list[Exception] = []

        async def one() -> None:
            with pytest.raises(type(fault)) as caught:
                await use(pool, HOST)
            faults.append(caught.value)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(one)
        assert faults == [fault] * 5
        assert builder.num_calls == 1


async def test_a_jail_that_needs_no_new_mounts_is_preferred(builder: FakeBuilder, open_pool: OpenPool) -> None:
    large = SandboxSpec(limits=Limits(disk_bytes=128 * MIB))
    base: Any = object()
    async with open_pool() as pool:
        async with pool.acquire(HOST), pool.acquire(large), pool.acquire(HOST, base):
            pass
        await settled(pool)
        for spec, under, number in ((large, None, 1), (HOST, base, 2), (HOST, None, 0), (large, None, 1)):
            async with pool.acquire(spec, under) as sandbox:
                assert sandbox.jail.number == number
            await settled(pool)


async def test_a_dead_idle_jail_leaves_the_pool_and_a_kept_one_is_replaced(
    builder: FakeBuilder, open_pool: OpenPool
) -> None:
    async with open_pool(warm=(Warm(count=2),)) as pool:
        await settled(pool)
        builder.built[0].die()
        await settled(pool)
        assert pool.statistics().died == 1
        assert sorted(builder.jails) == [1, 2]


async def test_what_is_not_proven_clean_is_destroyed_and_built_anew(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async def reset(jail: FakeJail) -> bool:
        return jail.number > 0

    builder.on_reset = reset
    async with open_pool() as pool:
        await use(pool, HOST)
        await settled(pool)
        now = pool.statistics()
        assert (now.unclean, now.recycled, now.warm) == (1, 0, 1)
        assert list(builder.jails) == [1], "another was built in the background, for there was use for one"


async def test_what_cannot_be_killed_is_quarantined_and_keeps_its_place(
    builder: FakeBuilder, open_pool: OpenPool
) -> None:
    async def unclean(_jail: FakeJail) -> bool:
        return False

    async def immortal(jail: FakeJail) -> bool:
        if jail.number == 1:
            await anyio.sleep_forever()
        return jail.number > 1

    builder.on_reset, builder.on_destroy = unclean, immortal
    async with open_pool(max_leased=3, max_jails=3, end_timeout_s=5.0) as pool:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(use, pool, HOST)
        await settled(pool)
        assert pool.statistics().quarantined == 2
        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(use, pool, HOST)
        assert builder.most_jails == 3
        assert builder.jails[0].num_leases == builder.jails[1].num_leases == 1
        builder.on_destroy = takes(0)
    assert builder.jails == {}


async def test_a_reset_that_never_ends_costs_its_jail(builder: FakeBuilder, open_pool: OpenPool) -> None:
    builder.on_reset = takes(1e6)
    async with open_pool(end_timeout_s=5.0, max_leased=1) as pool:
        await use(pool, HOST, 0.0)
        started_s = anyio.current_time()
        await use(pool, HOST, 0.0)
        assert anyio.current_time() - started_s == pytest.approx(5.0)


async def test_idle_jails_end_after_their_time_and_the_warm_ones_stay(
    builder: FakeBuilder, open_pool: OpenPool
) -> None:
    async with open_pool(idle_s=60.0, warm=(Warm(count=2),)) as pool:
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(use, pool, HOST)
        await settled(pool)
        assert pool.statistics().warm == 10
        await anyio.sleep(59)
        assert pool.statistics().warm == 10
        await anyio.sleep(2)
        assert pool.statistics().warm == 2
        assert pool.statistics().shrunk == 8


async def test_an_idle_pool_sets_no_timer(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async with open_pool(idle_s=60.0, warm=(Warm(count=2),)) as pool:
        await use(pool, HOST)
        await anyio.sleep(200)
        loop: Any = pool._loop
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]


async def test_an_idle_jail_of_another_kind_gives_way(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async with open_pool(max_leased=2, max_jails=2) as pool:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(use, pool, HOST)
        await settled(pool)
        assert pool.statistics().warm == 2
        async with pool.acquire(PYTHON), pool.acquire(PYTHON):
            assert [jail.key.image for jail in builder.jails.values()] == ["python", "python"]
        assert pool.statistics().shrunk == 2
        assert builder.most_jails == 2
