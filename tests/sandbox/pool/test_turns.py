"""Who is slow keeps nobody waiting."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from sandbox.turns import Turns

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend(virtual_time: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """These tests run in virtual time."""
    return virtual_time


async def test_no_more_than_the_count_have_a_turn() -> None:
    turns, now, most = Turns(3, slow_s=10), 0, 0

    async def one() -> None:
        nonlocal now, most
        async with turns.turn():
            now += 1
            most = max(most, now)
            await anyio.sleep(1)
            now -= 1

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(one)
    assert most == 3
    assert turns.num_slow == 0


async def test_who_is_slow_gives_its_turn_up_but_not_for_more_than_as_many_again() -> None:
    turns, begun = Turns(2, slow_s=1), []

    async def stuck(number: int) -> None:
        async with turns.turn():
            begun.append(number)
            await anyio.sleep(100)

    async with anyio.create_task_group() as group:
        for number in range(9):
            group.start_soon(stuck, number)
        await anyio.sleep(50)
        assert begun == [0, 1, 2, 3]
        assert turns.num_slow == 2
        await anyio.sleep(400)
        assert len(begun) == 9
        group.cancel_scope.cancel()
    assert turns.num_slow == 0
    with anyio.fail_after(0.5):
        async with turns.turn(), turns.turn():
            pass
