"""Random sequences of everything that can happen to a pool, in virtual time: nothing leaks, is lost or given out twice.

Invariants looked at after every step: no more leases, jails, builds, memory and processes than allowed; a sandbox has
one lease; the promises are those of the acquires on their way. At the end: every acquire has ended in exactly one way,
and once nothing disturbs any more everybody is served; the closed pool has left no jail.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.errors import (
    AcquireTimeoutError,
    ConfigError,
    PoolFullError,
    SandboxDiedError,
    StartError,
)
from sandbox.pool.config import PoolConfig, Warm
from sandbox.pool.pool import SandboxPool
from sandbox.types import MIB, Limits, SandboxSpec
from tests.sandbox.pool.fakes import FakeBuilder, FakeJail, JumpingLoop, is_still

SPECS = (
    SandboxSpec(limits=Limits(memory_bytes=56 * MIB, disk_bytes=8 * MIB, pids=8)),
    SandboxSpec(limits=Limits(memory_bytes=120 * MIB, disk_bytes=8 * MIB, pids=4)),
    SandboxSpec(image="python", limits=Limits(memory_bytes=24 * MIB, disk_bytes=8 * MIB, pids=16)),
    SandboxSpec(image="python", user=0, limits=Limits(memory_bytes=24 * MIB, disk_bytes=8 * MIB, pids=2)),
)
LEASES, JAILS, BUILDS, WAITING, MEMORY, PIDS = 4, 5, 2, 6, 320 * MIB, 40


class Trouble:
    """What the builder does wrong, drawn from its own source of chance."""

    def __init__(self, seed: int, share: float) -> None:
        self._chance = random.Random(seed)
        self.share = share

    def _strikes(self) -> bool:
        return self._chance.random() < self.share

    async def _takes(self, stuck_s: float) -> None:
        await anyio.sleep(stuck_s if self._strikes() else self._chance.choice((0.0, 0.01, 0.5)))

    async def build(self, _number: int, key: Any) -> None:
        await self._takes(90.0)
        if self._strikes():
            raise self._chance.choice((StartError("no"), SandboxDiedError("died")))
        if self._chance.random() < self.share / 10:
            raise ConfigError("spec.image", key.image, "there is none")

    async def lease(self, jail: FakeJail) -> None:
        await self._takes(20.0)
        if self._strikes():
            jail.alive = self._chance.random() < 0.5
            raise self._chance.choice((StartError("no"), SandboxDiedError("died"), ConfigError("a", "b", "c")))

    async def reset(self, _jail: FakeJail) -> bool:
        await self._takes(500.0)
        return not self._strikes()

    async def destroy(self, _jail: FakeJail) -> bool:
        await self._takes(500.0)
        return self._chance.random() >= self.share / 3


class World:
    """A pool, who uses it, and what has come of each."""

    def __init__(self, pool: SandboxPool, builder: FakeBuilder, group: Any) -> None:
        self.pool, self.builder, self._group = pool, builder, group
        self.num_asked = 0
        self.ends: Counter[str] = Counter()
        self.waiting: dict[int, anyio.CancelScope] = {}
        self.holding: dict[int, tuple[Any, anyio.Event]] = {}
        self.shares: list[Any] = []

    async def _one(self, number: int, kind: int, priority: int, deadline_s: float | None) -> None:
        spec, end = SPECS[kind], "cancelled"
        with anyio.CancelScope() as scope:
            self.waiting[number] = scope
            try:
                async with self.pool.acquire(spec, priority=priority, deadline_s=deadline_s) as sandbox:
                    assert sandbox.spec == spec
                    assert all(sandbox is not other for other, _ in self.holding.values()), "given out twice"
                    leave = anyio.Event()
                    self.holding[number] = sandbox, leave
                    end = "cancelled while held"
                    await leave.wait()
                    end = "served"
            except (AcquireTimeoutError, PoolFullError, StartError, SandboxDiedError, ConfigError) as error:
                end = type(error).__name__
            finally:
                self.holding.pop(number, None)
                del self.waiting[number]
                self.ends[end] += 1

    def step(self, move: str, value: int) -> None:
        """Does one thing."""
        numbers = sorted(self.holding)
        chosen = numbers[value % len(numbers)] if numbers else None
        if move == "acquire":
            deadline_s = anyio.current_time() + value if value % 3 == 0 else None
            self._group.start_soon(self._one, self.num_asked, value % len(SPECS), value % 5 - 2, deadline_s)
            self.num_asked += 1
        elif move == "leave" and chosen is not None:
            self.holding[chosen][1].set()
        elif move == "cancel" and self.waiting:
            self.waiting[sorted(self.waiting)[value % len(self.waiting)]].cancel()
        elif move == "kill" and self.builder.jails:
            jails = list(self.builder.jails.values())
            jails[value % len(jails)].die()
        elif move == "share" and chosen is not None:
            self.shares.append(self.pool.share(self.holding[chosen][0], for_s=1.0 + value))
        elif move == "unshare" and self.shares:
            self.shares.pop(value % len(self.shares)).close()
        elif move == "extend" and self.shares and not self.shares[-1].closed:
            self.shares[-1].extend(1.0 + value)

    def check(self) -> None:
        """What holds at every moment."""
        now = self.pool.statistics()
        builder, leased = self.builder, self.builder.leased
        assert builder.most_leased <= LEASES + now.quarantined
        assert builder.most_jails <= JAILS
        assert now.building - now.slow <= BUILDS
        assert now.waiting <= WAITING + LEASES
        assert now.leased + now.resetting <= LEASES
        assert now.promised_memory_bytes <= MEMORY
        assert now.promised_pids <= PIDS
        ours = [jail for jail in leased if jail.sandbox in self.pool._leases]
        assert len(ours) == now.leased
        assert now.promised_pids >= sum(jail.sandbox.spec.limits.pids for jail in ours if jail.sandbox)
        assert now.warm + now.leased + now.quarantined <= JAILS
        assert {id(sandbox) for sandbox, _ in self.holding.values()} <= {id(jail.sandbox) for jail in leased}

    async def calm_down(self) -> None:
        """Nothing goes wrong any more and everybody leaves when served: then everybody is served."""
        self.builder.on_build = self.builder.on_lease = quiet
        self.builder.on_reset = self.builder.on_destroy = quiet
        for share in self.shares:
            share.close()
        for _ in range(2000):
            if not self.waiting:
                break
            for _, leave in list(self.holding.values()):
                leave.set()
            if self.pool.statistics().quarantined >= JAILS:  # then nobody can be
                for scope in list(self.waiting.values()):
                    scope.cancel()
            await anyio.sleep(1.0)
        assert not self.waiting, self.pool.statistics()
        for _ in range(2000):
            if is_still(self.pool):
                break
            await anyio.sleep(1.0)
        assert is_still(self.pool)
        now = self.pool.statistics()
        assert (now.leased, now.promised_memory_bytes, now.promised_pids) == (0, 0, 0)
        assert sum(self.ends.values()) == self.num_asked
        assert self.ends["served"] + self.ends["cancelled while held"] == now.acquired
        assert self.ends["AcquireTimeoutError"] == now.timeouts
        assert self.ends["PoolFullError"] == now.refused
        assert len(self.builder.jails) == now.warm + now.quarantined


async def quiet(*_: object) -> None:
    """Goes well."""
    await anyio.sleep(0.001)


MOVES = ("acquire", "acquire", "acquire", "leave", "leave", "cancel", "kill", "share", "unshare", "extend")
PAUSES_S = (0.0, 0.0, 0.005, 0.3, 7.0)
steps = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 59), st.sampled_from(PAUSES_S)), max_size=80)
CONFIG = PoolConfig(
    max_leased=LEASES,
    max_jails=JAILS,
    max_building=BUILDS,
    max_waiting=WAITING,
    memory_bytes=MEMORY,
    pids=PIDS,
    warm=(Warm(count=1),),
    idle_s=5.0,
    min_free_bytes=0,
    max_memory_pressure=1.0,
    max_io_pressure=1.0,
    end_timeout_s=30.0,
)


async def live(moves: list[tuple[str, int, float]], seed: int, share: float, *, abrupt: bool) -> None:
    """A pool's life."""
    builder, trouble = FakeBuilder(), Trouble(seed, share)
    builder.on_build, builder.on_lease = trouble.build, trouble.lease
    builder.on_reset, builder.on_destroy = trouble.reset, trouble.destroy
    async with anyio.create_task_group() as group:
        async with SandboxPool.start(builder, CONFIG, clock=anyio.current_time) as pool:  # type: ignore[arg-type]
            world = World(pool, builder, group)
            for move, value, pause_s in moves:
                world.step(move, value)
                await anyio.sleep(pause_s)
                world.check()
            if not abrupt:
                await world.calm_down()
            builder.on_destroy = quiet
        assert builder.jails == {}, "the closed pool has left a jail"
        assert builder.num_building == 0
        for scope in list(world.waiting.values()):
            scope.cancel()
    assert sum(world.ends.values()) == world.num_asked


@pytest.mark.parametrize("abrupt", [False, True], ids=["calmed", "closed in the middle"])
@given(steps, st.integers(0, 1 << 30), st.sampled_from((0.0, 0.1, 0.4)))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_happens_nothing_leaks_and_nobody_is_lost(
    abrupt: bool, moves: list[tuple[str, int, float]], seed: int, share: float
) -> None:
    anyio.run(
        lambda: live(moves, seed, share, abrupt=abrupt),
        backend="asyncio",
        backend_options={"loop_factory": JumpingLoop},
    )
