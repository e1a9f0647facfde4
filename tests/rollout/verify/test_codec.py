"""The byte format between graded code and those who judge it."""

from __future__ import annotations

import collections
import math
import random
import time

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.verify.guest.codec import (
    MAX_DEPTH,
    CodecError,
    Listed,
    Opaque,
    Unhashed,
    bounded_text,
    decode,
    encode,
)
from rollout.verify.guest.messages import MAX_TEXT, candidate_message
from rollout.verify.layers.shown import shown

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=8)
DATA = st.recursive(
    HASHABLE,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner) | st.dictionaries(HASHABLE, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(DATA)
def test_plain_data_arrives_as_it_was(value: object) -> None:
    arrived = decode(encode(value))
    assert arrived == value
    assert type(arrived) is type(value)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_decode_to_plain_data_or_are_refused(data: bytes) -> None:
    for hashed in (True, False):
        try:
            decode(data, hashed)
        except CodecError:
            continue


def test_damaged_encodings_are_decoded_or_refused_and_nothing_else() -> None:
    whole = encode([1, "text", {"key": (1.5, None)}, {3, 4}, b"x", 10**30, range(3), frozenset("ab")])
    rng = random.Random(1)
    for _ in range(3000):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode(bytes(data))
        except CodecError:
            continue


def test_not_a_number_and_infinities_survive() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode([math.inf, -math.inf, -0.0])) == [math.inf, -math.inf, 0.0]


def test_subclasses_of_builtin_types_are_flattened_whatever_they_override() -> None:
    class Liar(int):
        def __add__(self, other: object) -> int:
            return 42

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class LyingList(list):
        def __iter__(self):
            return iter([1, 2, 3])

        def __len__(self) -> int:
            return 3

    Point = collections.namedtuple("Point", "x y")
    values = {
        Liar(7): 7,
        Point(1, 2): (1, 2),
    }
    for value, plain in values.items():
        arrived = decode(encode(value))
        assert arrived == plain
        assert type(arrived) is type(plain)
    assert decode(encode(LyingList([9]))) == [9]
    assert decode(encode(collections.Counter("aab"))) == {"a": 2, "b": 1}
    assert decode(encode(collections.defaultdict(list, {1: [2]}))) == {1: [2]}
    assert decode(encode(collections.OrderedDict([(1, 2)]))) == {1: 2}
    assert decode(encode(collections.deque([1, 2]))) == [1, 2]


def test_numpy_scalars_arrive_as_python_scalars_and_arrays_do_not() -> None:
    assert decode(encode([numpy.int64(3), numpy.float32(0.5), numpy.bool_(True)])) == [3, 0.5, True]
    assert isinstance(decode(encode(numpy.array([1, 2]))), Opaque)


def test_an_object_with_a_lying_eq_is_opaque_and_equals_nothing() -> None:
    class AlwaysEqual:
        def __eq__(self, other: object) -> bool:
            return True

        def __repr__(self) -> str:
            raise RuntimeError("no")

    arrived = decode(encode(AlwaysEqual()))
    assert isinstance(arrived, Opaque)
    assert arrived != 1
    assert arrived != arrived
    assert "unprintable" in repr(arrived)


def test_iterators_are_listed_only_when_asked_and_only_so_far() -> None:
    assert isinstance(decode(encode(iter([1, 2]))), Opaque)
    listed = decode(encode(iter([1, 2]), iterators=True))
    assert isinstance(listed, Listed)
    assert (listed.items, listed.complete) == ([1, 2], True)
    endless = decode(encode((0 for _ in iter(int, 1)), iterators=True))
    assert isinstance(endless, Listed)
    assert not endless.complete


def test_too_deep_values_become_opaque_and_too_deep_bytes_are_refused() -> None:
    value: object = 1
    for _ in range(MAX_DEPTH * 2):
        value = [value]
    arrived = decode(encode(value))
    for _ in range(MAX_DEPTH + 1):
        assert isinstance(arrived, list)
        arrived = arrived[0]
    assert isinstance(arrived, Opaque)
    with pytest.raises(CodecError, match="nested deeper"):
        decode(b"l\0\0\0\1" * (MAX_DEPTH + 2) + b"N")


def test_a_value_that_contains_itself_does_not_hang() -> None:
    value: list[object] = []
    value.append(value)
    decode(encode(value))


def test_values_over_the_bound_are_refused_while_they_are_encoded() -> None:
    for value in ("x" * 2000, [0] * 2000, 1 << 20_000):
        with pytest.raises(CodecError):
            encode(value, max_bytes=1000)


def test_counts_that_promise_more_than_there_is_are_refused_at_once() -> None:
    with pytest.raises(CodecError, match="a count of"):
        decode(b"l\xff\xff\xff\xffN")
    with pytest.raises(CodecError, match="too many"):
        decode(b"NN")


def test_sets_and_dicts_of_a_stranger_are_not_hashed_in_the_engine() -> None:
    colliding = [k * (2**61 - 1) for k in range(3000)]  # all of these ints have the hash 0
    data = encode({None: None}) and encode(set(colliding[:2]))
    assert isinstance(decode(data, hashed=False), Unhashed)
    # Built by hand, since building the real set takes quadratic time as well.
    payload = b"e" + len(colliding).to_bytes(4, "big") + b"".join(encode(number) for number in colliding)
    started_s = time.perf_counter()
    arrived = decode(payload, hashed=False)
    assert time.perf_counter() - started_s < 1.0
    assert isinstance(arrived, Unhashed)
    assert len(arrived.items) == 3000


UNPRINTABLE = st.booleans().map(lambda positive: 10**5000 if positive else -(10**5000))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just("\ud800") | UNPRINTABLE,
    lambda inner: st.lists(inner, max_size=4) | st.builds(Listed, st.lists(inner, max_size=2), st.booleans()),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["loaded", "failed", "result", "error", "ready", 1]), st.lists(ANYTHING, max_size=4))
def test_a_message_has_the_fields_it_should_have_or_is_refused(kind: object, fields: list[object]) -> None:
    promised = {"loaded": (), "failed": (str, str), "error": (int, str, str), "result": (int, None, None)}.get(kind)
    types = tuple(map(type, fields))
    fits = (
        promised is not None
        and len(promised) == len(types)
        and all(mine in (None, theirs) for mine, theirs in zip(promised, types, strict=True))
    )
    if fits:
        assert candidate_message([kind, *fields]) == [kind, *fields]
    else:
        with pytest.raises(CodecError, match="no known form"):
            candidate_message([kind, *fields])


def test_texts_of_a_message_are_bounded() -> None:
    assert candidate_message(["failed", "x" * 9999, "y"]) == ["failed", "x" * MAX_TEXT, "y"]


@settings(max_examples=200, deadline=None)
@given(ANYTHING)
def test_every_value_has_a_bounded_text(value: object) -> None:
    arrived = decode(encode(value), hashed=False)
    assert len(shown(arrived)) <= 600
    assert len(bounded_text(arrived)) <= 200


def test_a_range_that_is_too_long_to_be_listed_is_opaque_where_that_is_asked() -> None:
    for numbers in (range(11), range(0, -(10**5000), -1), range(10**30)):
        assert decode(encode(numbers)) == numbers
        assert isinstance(decode(encode([numbers]), max_range=10)[0], Opaque)
    assert decode(encode(range(5, 105, 10)), max_range=10) == range(5, 105, 10)
