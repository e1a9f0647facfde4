"""The order of those that wait."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.pool.queue import FairQueue


def drain(queue: FairQueue[str]) -> list[str]:
    found = []
    while queue.first() is not None:
        found.append(queue.pop())
    return found


def test_within_a_priority_the_first_to_come_is_the_first_to_be_served() -> None:
    queue: FairQueue[str] = FairQueue(10, aging_s=30)
    for name in "cab":
        assert queue.push(name, 0, now_s=5.0)
    assert drain(queue) == ["c", "a", "b"]


def test_a_higher_priority_is_served_earlier() -> None:
    queue: FairQueue[str] = FairQueue(10, aging_s=30)
    queue.push("low", -1, 0.0)
    queue.push("normal", 0, 1.0)
    queue.push("high", 2, 2.0)
    assert drain(queue) == ["high", "normal", "low"]


def test_one_level_of_priority_is_worth_so_much_waiting() -> None:
    queue: FairQueue[str] = FairQueue(10, aging_s=30)
    queue.push("has waited", 0, 0.0)
    queue.push("comes soon", 1, 29.0)
    queue.push("comes late", 1, 31.0)
    assert drain(queue) == ["comes soon", "has waited", "comes late"]


def test_a_full_queue_takes_nobody_and_a_leaver_makes_room() -> None:
    queue: FairQueue[str] = FairQueue(2, aging_s=30)
    assert queue.push("a", 0, 0)
    assert queue.push("b", 0, 0)
    assert not queue.push("c", 9, 0)
    assert queue.discard("a")
    assert not queue.discard("a")
    assert queue.push("c", 0, 0)
    assert drain(queue) == ["b", "c"]
    with pytest.raises(AssertionError):
        queue.pop()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(-3, 3), st.floats(0, 50)),
            st.tuples(st.just("pop"), st.just(0), st.just(0.0)),
            st.tuples(st.just("discard"), st.integers(0, 300), st.just(0.0)),
        ),
        max_size=400,
    )
)
def test_it_serves_as_a_sorted_list_would(steps: list[tuple[str, int, float]]) -> None:
    queue: FairQueue[int] = FairQueue(40, aging_s=7.0)
    waiting: list[tuple[float, int]] = []
    now_s, number = 0.0, 0
    for step, value, pause_s in steps:
        now_s += pause_s
        if step == "push":
            fits = queue.push(number, value, now_s)
            assert fits == (len(waiting) < 40)
            if fits:
                waiting.append((now_s - value * 7.0, number))
            number += 1
        elif step == "pop" and waiting:
            waiting.sort()
            assert queue.first() == waiting[0][1]
            assert queue.pop() == waiting.pop(0)[1]
        elif step == "discard":
            there = [entry for entry in waiting if entry[1] == value]
            assert queue.discard(value) == bool(there)
            waiting = [entry for entry in waiting if entry[1] != value]
        assert len(queue) == len(waiting)
