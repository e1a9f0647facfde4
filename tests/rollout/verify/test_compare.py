"""When a result is the expected one."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest

from rollout.verify.compare import equal, materialized
from rollout.verify.guest.codec import decode, encode
from rollout.verify.layers.cases import shown


def sent(value: Any) -> Any:
    """The value as it arrives in the engine."""
    return decode(encode(value, iterators=True), hashed=False)


EQUAL = [
    (1, 1.0),
    (1, True),
    (0, False),
    (2**100, 2**100),
    ([1, (2, "a")], [1, (2, "a")]),
    ({1, 2}, {2, 1}),
    ({1, 2}, frozenset({1, 2})),
    ({1: [2], "a": {3}}, {"a": {3}, 1: [2]}),
    ({1: 2}, {True: 2.0}),
    ({(1, 2), (3, 4)}, {(3, 4), (1, 2)}),
    ({frozenset({1}), frozenset()}, {frozenset(), frozenset({1})}),
    (math.nan, math.nan),
    ([math.inf], [math.inf]),
    (b"x", bytearray(b"x")),
    (None, None),
    ("é", "é"),
    (1 + 2j, 1 + 2j),
    ({"a": 1}, collections.Counter("a")),
    (range(3), range(3)),
    ({}, {}),
    (set(), set()),
]
UNEQUAL = [
    (1, "1"),
    (1, None),
    ([1, 2], (1, 2)),
    ([1, 2], [1, 2, 3]),
    ([1, 2], {1, 2}),
    ({1, 2}, {1, 2, 3}),
    ({1: 2}, {1: 3}),
    ({1: 2}, {2: 2}),
    ({1: 2}, [(1, 2)]),
    (set(), {}),
    ("a", b"a"),
    (0.1 + 0.2, 0.3),
    (None, False),
    ([1], iter([1])),
    (math.nan, 0.0),
    ({("a", "b")}, {("a", "c")}),
]


@pytest.mark.parametrize(("expected", "actual"), EQUAL)
def test_equal_as_python_has_it(expected: Any, actual: Any) -> None:
    assert equal(expected, sent(actual))


@pytest.mark.parametrize(("expected", "actual"), UNEQUAL)
def test_unequal_as_python_has_it(expected: Any, actual: Any) -> None:
    assert not equal(expected, sent(actual))


def test_a_tolerance_covers_floats_at_any_depth_and_nothing_else() -> None:
    assert equal([{"a": 0.3}], sent([{"a": 0.1 + 0.2}]), atol=1e-9)
    assert equal({0.3}, sent({0.1 + 0.2}), atol=1e-9)
    assert equal(1e9, sent(1e9 + 1), atol=1e-9)  # one part in a million, whatever is larger
    assert not equal(1.0, sent(1.1), atol=1e-3)
    assert not equal(3, sent(4), atol=10.0)
    assert not equal("a", sent("b"), atol=10.0)
    assert not equal(1.0, sent(10**400), atol=1.0)


def test_iterators_are_materialized_only_when_they_are_complete() -> None:
    assert materialized(sent(iter([1, 2]))) == [1, 2]

    def broken():
        yield 1
        raise ValueError

    assert materialized(sent(broken())) != [1]


def test_what_is_shown_is_bounded_whatever_the_value() -> None:
    for value in (10**10_000, "x" * 10_000, [[list(range(1000))] * 100], {i: {i} for i in range(1000)}, object()):
        assert len(shown(sent(value))) <= 600
    assert shown(sent({"a": {1}})) == "dict([('a', set([1]))])"
