"""Whether a candidate's result is the expected one: by plain data alone, in the engine.

The rules are Python's own `==` on builtin types (1 == 1.0 == True, a list is no tuple, a set equals a frozenset),
with two exceptions, both stated: a NaN equals a NaN, and with `atol` > 0 numbers of which one
is a float or complex may differ by `max(atol, 1e-6 * |expected|)`.

Invariant: `actual` may come from anyone, so it is never hashed, its methods are builtin ones, and the
time is linear in its size (times the size of one set, where floats are compared with a tolerance).
"""

from __future__ import annotations

import math
import struct
from typing import Any

from rollout.verify.guest.codec import Listed, Opaque, Unhashed

RELATIVE_TOLERANCE = 1e-6


def equal(expected: Any, actual: Any, atol: float = 0.0) -> bool:
    """True when `actual`, decoded with `hashed=False`, is `expected`."""
    if isinstance(expected, (int, float, complex)):
        return isinstance(actual, (int, float, complex)) and _numbers_equal(expected, actual, atol)
    if isinstance(expected, (list, tuple)):
        kind = list if isinstance(expected, list) else tuple
        return (
            isinstance(actual, kind)
            and len(expected) == len(actual)
            and all(equal(mine, theirs, atol) for mine, theirs in zip(expected, actual, strict=True))
        )
    if isinstance(expected, (set, frozenset)):
        return isinstance(actual, Unhashed) and actual.kind in "eE" and _sets_equal(expected, actual.items, atol)
    if isinstance(expected, dict):
        return isinstance(actual, Unhashed) and actual.kind == "d" and _dicts_equal(expected, actual.items, atol)
    if isinstance(actual, (Opaque, Unhashed, Listed)):
        return False
    if isinstance(expected, (bytes, bytearray)):
        return isinstance(actual, (bytes, bytearray)) and expected == actual
    return type(expected) is type(actual) and bool(expected == actual)


def materialized(value: Any) -> Any:
    """The list of an iterator's items, where the candidate listed one completely; else the value itself."""
    return value.items if isinstance(value, Listed) and value.complete else value


def _numbers_equal(expected: Any, actual: Any, atol: float) -> bool:
    if expected == actual or (expected != expected and actual != actual):
        return True
    if atol <= 0 or not (isinstance(expected, (float, complex)) or isinstance(actual, (float, complex))):
        return False
    try:
        difference, scale = abs(expected - actual), abs(expected)
    except OverflowError:  # an int beyond all floats
        return False
    return math.isfinite(difference) and difference <= max(atol, RELATIVE_TOLERANCE * scale)


def _key(value: Any) -> bytes:
    """Equal values have equal keys (for atol = 0); a bytes key is hashed with the process's own secret."""
    if isinstance(value, (int, float, complex)):
        return _number_key(value)
    if isinstance(value, str):
        return b"s" + _sized(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray)):
        return b"b" + _sized(bytes(value))
    if isinstance(value, (list, tuple)):
        return (b"l" if isinstance(value, list) else b"t") + _sized(b"".join(map(_key, value)))
    if isinstance(value, (set, frozenset)):
        return b"e" + _sized(b"".join(sorted(map(_key, value))))
    if isinstance(value, Unhashed) and value.kind in "eE":
        return b"e" + _sized(b"".join(sorted({_key(item) for item in value.items})))
    if value is None:
        return b"N"
    if isinstance(value, range):
        return b"r" + _sized(_key((value[0], value[-1], value.step) if value else ()))
    return b"o" + id(value).to_bytes(8, "big")  # what equals nothing has a key of its own


def _number_key(value: Any) -> bytes:
    if isinstance(value, complex) and value.imag == 0:
        value = value.real
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return b"i" + _sized(value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if isinstance(value, complex):
        return b"c" + struct.pack(">dd", value.real, value.imag)
    return b"f" + struct.pack(">d", value if value == value else math.nan)


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def _sets_equal(expected: Any, actual: list[Any], atol: float) -> bool:
    theirs = {_key(item): item for item in actual}
    mine = {_key(item): item for item in expected}
    if len(theirs) != len(mine):
        return False
    return mine.keys() == theirs.keys() or (
        atol > 0 and all(any(equal(item, other, atol) for other in theirs.values()) for item in mine.values())
    )


def _dicts_equal(expected: dict[Any, Any], actual: list[Any], atol: float) -> bool:
    theirs = {_key(key): item for key, item in actual}
    mine = {_key(key): item for key, item in expected.items()}
    return mine.keys() == theirs.keys() and all(equal(item, theirs[key], atol) for key, item in mine.items())
