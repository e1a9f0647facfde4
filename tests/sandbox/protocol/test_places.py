"""Places: as many as there are, in the order of coming, and never lost."""

from __future__ import annotations

import anyio
import pytest

from sandbox.cgroup.absent import AbsentSet
from sandbox.errors import SandboxDiedError, SandboxError
from sandbox.protocol.places import Places

pytestmark = pytest.mark.anyio


class Set(AbsentSet):
    """Counts its leaves; the first ones can be refused."""

    def __init__(self, num_refusals: int = 0) -> None:
        self.num_refusals = num_refusals
        self.lent: list[str] = []
        self.num_taken = 0

    def take_leaf(self) -> str:
        if self.num_refusals:
            self.num_refusals -= 1
            raise OSError(24, "Too many open files")
        self.num_taken += 1
        self.lent.append(f"c{self.num_taken}")
        return self.lent[-1]

    def return_leaf(self, leaf: str) -> None:
        self.lent.remove(leaf)

    def kill_leaf(self, leaf: str) -> None:
        assert leaf in self.lent


async def test_who_waits_is_served_in_the_order_of_coming() -> None:
    places, served = Places(Set(), 2), []

    async def come(ident: int) -> None:
        await places.take(ident)
        served.append(ident)

    async with anyio.create_task_group() as group:
        for ident in range(5):
            group.start_soon(come, ident)
            await anyio.wait_all_tasks_blocked()
        assert served == [0, 1]
        places.over(1)
        places.over(1)  # said twice, or of somebody unknown: nothing
        places.over(77)
        late = anyio.CancelScope()

        async def come_late() -> None:
            with late:
                await come(9)

        group.start_soon(come_late)
        await anyio.wait_all_tasks_blocked()
        assert served == [0, 1, 2]
        places.over(0)
        places.over(2)
        await anyio.wait_all_tasks_blocked()
        assert served == [0, 1, 2, 3, 4]
        late.cancel()
    places.over(3)
    with anyio.fail_after(5):
        await come(10)
    assert served == [0, 1, 2, 3, 4, 10]


async def test_a_place_is_not_lost_to_a_cancellation_or_a_failure() -> None:
    places = Places(Set(num_refusals=3), 1)
    for ident in range(3):
        with pytest.raises(SandboxError, match="Too many open files"):
            await places.take(ident)
    await places.take(3)
    for ident in range(4, 8):
        with anyio.move_on_after(0) as scope:
            await places.take(ident)
        assert scope.cancelled_caught
    scope = anyio.CancelScope()

    async def wait() -> None:
        with scope:
            await places.take(8)
            places.over(8)

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        places.over(3)  # and in the same moment
        scope.cancel()
    with anyio.fail_after(5):
        await places.take(9)


async def test_the_end_of_the_sandbox_wakes_all_who_wait() -> None:
    cgroups = Set()
    places, told = Places(cgroups, 2), []

    async def come(ident: int) -> None:
        with pytest.raises(SandboxDiedError, match="so it ended"):
            await places.take(ident)
        told.append(ident)

    leaf = await places.take(0)
    await places.take(1)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for ident in range(2, 7):
                group.start_soon(come, ident)
            await anyio.wait_all_tasks_blocked()
            places.close("so it ended")
            places.close("and again")
    await come(8)
    assert sorted(told) == [2, 3, 4, 5, 6, 8]
    places.over(0)
    places.give_back(leaf)
    assert len(cgroups.lent) == 2, "control groups are not touched any more"


async def test_the_leaf_of_one_that_left_unreported_comes_back_when_its_end_is_told() -> None:
    cgroups = Set()
    places = Places(cgroups, 1)
    places.set_aside(5, await places.take(5))
    assert cgroups.lent == ["c1"]
    places.over(5)
    assert cgroups.lent == []
    places.give_back(await places.take(6))
    assert cgroups.lent == []
