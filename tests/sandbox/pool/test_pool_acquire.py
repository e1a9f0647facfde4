"""The pool on a builder of fakes, in virtual time: who gets a sandbox, when, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from sandbox.errors import (
    AcquireTimeoutError,
    ConfigError,
    PoolFullError,
    SandboxDiedError,
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


async def test_a_jail_is_used_again_by_the_next_tenant_of_its_kind(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        for _ in range(5):
            async with pool.acquire(HOST) as sandbox:
                assert sandbox.spec == HOST
            await settled(pool)
        assert len(builder.built) == 1
        now = pool.statistics()
        assert (now.warm, now.leased, now.acquired, now.warm_hits, now.built, now.recycled) == (1, 0, 5, 4, 1, 5)
        async with pool.acquire(PYTHON):
            assert len(builder.built) == 2
    assert builder.jails == {}


async def test_two_thousand_acquires_at_a_cap_of_64_are_all_served_in_turn(
    builder: FakeBuilder, open_pool: OpenPool
) -> None:
    builder.on_build = takes(0.2)
    builder.on_reset = takes(0.01)
    order: list[int] = []

    async def one(number: int) -> None:
        async with pool.acquire(HOST):
            order.append(number)
            await anyio.sleep(0.1)

    async with open_pool(max_leased=64, max_building=8) as pool, anyio.create_task_group() as group:
        for number in range(2000):
            group.start_soon(one, number)
    assert order == list(range(2000))
    now = pool.statistics()
    assert builder.most_leased == 64
    assert builder.most_building == 8
    assert len(builder.built) <= 64
    assert now.acquired == now.waits.count == 2000
    assert now.timeouts == now.refused == now.failed == 0
    assert 3.0 < now.waits.max_s < 6.0
    assert 0 < now.waits.p50_s < now.waits.p99_s <= now.waits.max_s
    assert builder.jails == {}


async def test_a_higher_priority_overtakes_and_waiting_counts(builder: FakeBuilder, open_pool: OpenPool) -> None:
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        async with pool.acquire(HOST, priority=priority):
            order.append(name)
            await anyio.sleep(1)

    async with open_pool(max_leased=1, aging_s=30.0) as pool, anyio.create_task_group() as group:
        group.start_soon(use, pool, HOST, 40.0)
        await anyio.sleep(1)
        group.start_soon(one, "low", 0)
        await anyio.sleep(10)
        group.start_soon(one, "high", 1)
        await anyio.sleep(25)
        group.start_soon(one, "late and high", 1)
    assert order == ["high", "low", "late and high"]


async def test_a_full_pool_refuses_and_says_which_setting(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async with open_pool(max_leased=1, max_waiting=2) as pool, anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(use, pool, HOST)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(PoolFullError, match=r"pool\.max_waiting = 2") as caught:
            await use(pool, HOST)
        assert (caught.value.field, caught.value.value) == ("pool.max_waiting", 2)
        assert pool.statistics().waiting == 2
        await anyio.sleep(1.5)
        await use(pool, HOST)
        assert pool.statistics().refused == 1


async def test_a_deadline_ends_the_waiting_and_says_what_for(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async with open_pool(max_leased=1) as pool:
        async with pool.acquire(HOST):
            started_s = anyio.current_time()
            with pytest.raises(AcquireTimeoutError, match=r"deadline_s, after 5\.000 s \(held back by leases\)"):
                await use(pool, HOST, deadline_s=started_s + 5)
            assert anyio.current_time() == started_s + 5
        builder.on_build = takes(60)
        with pytest.raises(AcquireTimeoutError, match="no jail of its kind was ready"):
            await use(pool, PYTHON, deadline_s=anyio.current_time() + 1)
        with pytest.raises(AcquireTimeoutError):
            await use(pool, PYTHON, deadline_s=anyio.current_time() - 1)
        assert pool.statistics().timeouts == 3
        assert pool.statistics().promised_pids == 0


async def test_a_warm_sandbox_is_there_even_for_whom_has_no_time_left_to_wait_for_one(
    builder: FakeBuilder, open_pool: OpenPool
) -> None:
    async with open_pool(warm=(Warm(count=1),)) as pool:
        await settled(pool)
        await use(pool, HOST, deadline_s=anyio.current_time() + 1e-3)


@pytest.mark.parametrize("station", ["queue", "build", "lease", "held"])
async def test_who_is_cancelled_leaves_nothing(builder: FakeBuilder, open_pool: OpenPool, station: str) -> None:
    async with open_pool(max_leased=1) as pool:
        async with anyio.create_task_group() as group:
            if station == "queue":
                group.start_soon(use, pool, HOST, 3.0)
                await anyio.sleep(1)
            if station == "build":
                builder.on_build = takes(10)
            if station == "lease":
                builder.on_lease = takes(10)
            with anyio.move_on_after(1) as scope:
                await use(pool, HOST, 10.0)
            assert scope.cancelled_caught
        await settled(pool)
        now = pool.statistics()
        assert (now.leased, now.promised_memory_bytes, now.promised_pids) == (0, 0, 0)
        assert now.cancelled == (station != "held")
        builder.on_build = builder.on_lease = takes(0)
        await use(pool, HOST)
        await settled(pool)
        assert len(builder.jails) == pool.statistics().warm == 1
    assert builder.jails == {}


async def test_a_fault_of_the_users_own_code_passes_as_it_is(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async def fail() -> None:
        async with open_pool() as pool, pool.acquire(HOST):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert builder.num_calls == 1
    assert builder.jails == {}


async def test_a_jail_that_cannot_be_leased_is_replaced_before_the_caller_sees_it(
    builder: FakeBuilder, open_pool: OpenPool
) -> None:
    async def lease(jail: FakeJail) -> None:
        if jail.number == 0:
            jail.alive = False
            raise SandboxDiedError("it does not answer")

    builder.on_lease = lease
    async with open_pool(warm=(Warm(count=1),)) as pool:
        await settled(pool)
        async with pool.acquire(HOST) as sandbox:
            assert sandbox.jail.number == 1
        await settled(pool)
        assert 0 not in builder.jails


async def test_a_spec_that_cannot_be_served_costs_no_jail(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async def lease(_jail: FakeJail) -> None:
        raise ConfigError("spec.insist", "x", "must be another")

    builder.on_lease = lease
    async with open_pool() as pool:
        with pytest.raises(ConfigError):
            await use(pool, HOST)
        assert (pool.statistics().warm, pool.statistics().promised_pids) == (1, 0)


async def test_promised_memory_holds_back_who_does_not_fit_and_nobody_overtakes(
    builder: FakeBuilder, open_pool: OpenPool
) -> None:
    large = SandboxSpec(limits=Limits(memory_bytes=192 * MIB, disk_bytes=8 * MIB))
    small = SandboxSpec(limits=Limits(memory_bytes=92 * MIB, disk_bytes=8 * MIB))
    order: list[str] = []

    async def one(name: str, spec: SandboxSpec) -> None:
        async with pool.acquire(spec):
            order.append(name)
            await anyio.sleep(1)

    async with open_pool(memory_bytes=250 * MIB) as pool, anyio.create_task_group() as group:
        for name, spec in (("first", small), ("large", large), ("small", small)):
            group.start_soon(one, name, spec)
            await anyio.wait_all_tasks_blocked()
        assert pool.statistics().held_back_by == "memory"
        assert pool.statistics().promised_memory_bytes == 100 * MIB
        with pytest.raises(ConfigError, match="the pool gives out"):
            await use(pool, SandboxSpec(limits=Limits(memory_bytes=300 * MIB)))
    assert order == ["first", "large", "small"]


async def test_a_share_keeps_the_sandbox_after_its_acquirer_has_left(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async with open_pool(max_leased=1) as pool:
        async with pool.acquire(HOST) as sandbox:
            share = pool.share(sandbox, for_s=10)
        await anyio.sleep(5)
        assert builder.jails[0].sandbox is sandbox
        async with share as same:
            assert same is sandbox
            share.extend(100)
            await anyio.sleep(50)
            assert builder.jails[0].sandbox is sandbox
        await settled(pool)
        assert builder.jails[0].ready
        with pytest.raises(SandboxDiedError):
            share.extend(1)
        with pytest.raises(SandboxDiedError):
            pool.share(sandbox, 1)


async def test_a_share_that_is_forgotten_ends_with_its_time(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async with open_pool(max_leased=1) as pool:
        async with pool.acquire(HOST) as sandbox:
            first, second = pool.share(sandbox, for_s=10), pool.share(sandbox, for_s=20)
            with pytest.raises(ConfigError):
                pool.share(sandbox, for_s=0)
        await anyio.sleep(11)
        assert first.closed
        assert not second.closed
        assert builder.jails[0].sandbox is sandbox
        started_s = anyio.current_time()
        await use(pool, HOST, 0.0)
        assert anyio.current_time() - started_s == pytest.approx(9.0)


async def test_closing_the_pool_ends_everything_and_tells_who_waits(builder: FakeBuilder, open_pool: OpenPool) -> None:
    told: list[str] = []

    async def one(for_s: float) -> None:
        try:
            async with pool.acquire(HOST) as sandbox:
                shares.append(pool.share(sandbox, 1000))
                await anyio.sleep(for_s)
        except SandboxDiedError as error:
            told.append(str(error))

    shares: list[Any] = []
    builder.on_reset = takes(3)
    async with anyio.create_task_group() as group:
        async with open_pool(max_leased=2) as pool:
            for for_s in (0.1, 100.0, 100.0, 100.0):
                group.start_soon(one, for_s)
            await anyio.sleep(1)
            shares[0].close()
            await anyio.sleep(1)
        assert builder.jails == {}
        await anyio.wait_all_tasks_blocked()
        assert told == ["the pool was closed"] * 2
        with pytest.raises(SandboxDiedError, match="closed"):
            await use(pool, HOST)
        assert all(share.closed for share in shares)


async def test_a_host_that_ends_is_told_to_all_who_wait_and_who_come(builder: FakeBuilder, open_pool: OpenPool) -> None:
    told: list[str] = []

    async def one(spec: SandboxSpec) -> None:
        try:
            await use(pool, spec, 5.0)
        except SandboxDiedError as error:
            told.append(str(error))

    builder.on_build = takes(1)
    async with open_pool(max_leased=2) as pool, anyio.create_task_group() as group:
        for spec in (HOST, PYTHON, HOST):
            group.start_soon(one, spec)
        await anyio.sleep(0.5)
        builder.lost.set()
        await anyio.sleep(0.5)
        assert ["its warden died" in words for words in told] == [True] * 3
        with pytest.raises(SandboxDiedError, match="its warden died"):
            await use(pool, HOST)
    assert builder.jails == {}


async def test_a_cancelled_pool_ends_everything(builder: FakeBuilder, open_pool: OpenPool) -> None:
    with anyio.move_on_after(1) as scope:
        async with open_pool() as pool:
            builder.on_build = takes(100)
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(use, pool, HOST)
    assert scope.cancelled_caught
    assert builder.jails == {}
    assert builder.num_building == 0


async def test_priorities_out_of_range_are_refused_by_name(builder: FakeBuilder, open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        for priority in (101, -101, 1.5, True):
            with pytest.raises(ConfigError, match=r"^priority = "):
                await use(pool, HOST, priority=priority)
        with pytest.raises(ConfigError, match=r"^deadline_s = "):
            await use(pool, HOST, deadline_s=float("nan"))
