"""The pool on a real host, with both jails."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import msgspec
import pytest

from sandbox.host import SandboxHost
from sandbox.pool.config import PoolConfig
from sandbox.pool.pool import SandboxPool
from sandbox.types import MIB, Command, JailName, Limits, SandboxSpec
from tests.sandbox.pool.fakes import settled
from tests.sandbox.pool.soak_recycling import LOOK, PROGRAMS

pytestmark = pytest.mark.anyio

SMALL = Limits(memory_bytes=32 * MIB, disk_bytes=MIB, pids=12)
TRUE = Command(argv=("true",))


@pytest.fixture
def spec(jail: JailName) -> SandboxSpec:
    """A small sandbox."""
    return SandboxSpec(limits=SMALL, jail=jail)


@pytest.fixture
async def pool(host: SandboxHost) -> AsyncIterator[SandboxPool]:
    """A pool of eight."""
    async with SandboxPool.start(host, PoolConfig(max_leased=8)) as pool:
        yield pool
    assert host.num_live == 0


async def test_a_warm_sandbox_is_as_fresh_as_a_new_one(pool: SandboxPool, spec: SandboxSpec) -> None:
    numbers = set()
    for _ in range(3):
        async with pool.acquire(spec) as box:
            numbers.add(box.jail.number)
            outcome = await box.run(Command(argv=("sh", "-c", "ls -A /workspace /tmp && touch /workspace/a /tmp/b")))
            assert outcome.stdout.split() == [b"/tmp:", b"/workspace:"], outcome
        await settled(pool)
    now = pool.statistics()
    assert (len(numbers), now.recycled, now.unclean, now.built) == (1, 3, 0, 1)


async def test_another_size_of_the_workspace_is_served_by_the_same_jail(pool: SandboxPool, spec: SandboxSpec) -> None:
    for disk_bytes in (MIB, 4 * MIB, MIB):
        limits = msgspec.structs.replace(SMALL, disk_bytes=disk_bytes)
        async with pool.acquire(msgspec.structs.replace(spec, limits=limits)) as box:
            outcome = await box.run(Command(argv=("sh", "-c", "head -c 9000000 /dev/zero > big; stat -c %s big")))
            assert int(outcome.stdout) <= disk_bytes
        await settled(pool)
    assert pool.statistics().built == 1


async def test_many_more_acquires_than_places_are_served(pool: SandboxPool, spec: SandboxSpec) -> None:
    async def one() -> None:
        async with pool.acquire(spec) as box:
            assert (await box.run(TRUE)).ok

    async with anyio.create_task_group() as group:
        for _ in range(100):
            group.start_soon(one)
    now = pool.statistics()
    assert now.acquired == 100
    assert now.built <= 9


@pytest.mark.parametrize("program", PROGRAMS[1:])
async def test_the_soaks_own_look_sees_what_each_of_its_programs_leaves(
    pool: SandboxPool, spec: SandboxSpec, program: str
) -> None:
    async with pool.acquire(spec) as box:
        assert b"stale" not in (await box.run(Command(argv=("sh", "-c", LOOK)))).stdout
        await box.run(Command(argv=("sh", "-c", program)))
        with anyio.fail_after(30):  # what was started in the background may still be on its way
            while b"stale" not in (await box.run(Command(argv=("sh", "-c", LOOK)))).stdout:
                pass
