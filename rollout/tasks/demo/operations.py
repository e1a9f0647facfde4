"""The 59 operations of the demo family: their words, their one line of Python, and how it goes wrong.

Owns the operation table. Invariant: every line assigns `x` from `x` alone, maps a list of ints to a
list of ints for any list (the empty one included), and is written as words separated by spaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Values: TypeAlias = list[int]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: `words` is what the prompt says, `line` what solves it, `bugs` what nearly does."""

    words: str
    line: str
    bugs: tuple[str, ...]


def _comprehension(value: str, condition: str = "") -> str:
    return f"x = [ {value} for v in x if {condition} ]" if condition else f"x = [ {value} for v in x ]"


def _filter(words: str, condition: str, *bugs: str) -> Operation:
    return Operation(words, _comprehension("v", condition), tuple(_comprehension("v", bug) for bug in bugs))


def _map(words: str, value: str, *bugs: str) -> Operation:
    return Operation(words, _comprehension(value), tuple(_comprehension(bug) for bug in bugs))


def _whole(words: str, value: str, *bugs: str) -> Operation:
    return Operation(words, f"x = {value}", tuple(f"x = {bug}" for bug in bugs))


def operations() -> tuple[Operation, ...]:
    """All 59 operations, in a fixed order.

    The bugs are the usual ones: off by one, a wrong comparison, a wrong slice.
    """
    return (
        *(_filter(f"above {k}", f"v > {k}", f"v >= {k}", f"v > {k + 1}") for k in range(2, 7)),
        *(_filter(f"below {k}", f"v < {k}", f"v <= {k}", f"v < {k - 1}") for k in range(4, 9)),
        *(_filter(f"without {k}", f"v != {k}", f"v == {k}", f"v != {k + 1}") for k in range(1, 4)),
        _filter("evens", "v % 2 == 0", "v % 2 == 1"),
        _filter("odds", "v % 2 == 1", "v % 2 == 0"),
        *(_map(f"plus {k}", f"v + {k}", f"v + {k + 1}") for k in range(1, 6)),
        *(_map(f"minus {k}", f"v - {k}", f"v - {k + 1}") for k in range(1, 6)),
        *(_map(f"times {k}", f"v * {k}", f"v * {k + 1}") for k in range(2, 6)),
        *(_map(f"modulo {k}", f"v % {k}", f"v % {k + 1}") for k in range(2, 6)),
        *(_map(f"over {k}", f"v // {k}", f"v // {k + 1}") for k in range(2, 5)),
        _map("negate", "- v", "1 - v"),
        _map("square", "v * v", "v + v"),
        _map("absolute", "abs ( v )", "abs ( v ) + 1"),
        *(_whole(f"first {k}", f"x [ : {k} ]", f"x [ : {k - 1} ]", f"x [ 1 : {k} ]") for k in range(2, 6)),
        *(_whole(f"skip {k}", f"x [ {k} : ]", f"x [ {k + 1} : ]") for k in range(1, 5)),
        *(_whole(f"last {k}", f"x [ - {k} : ]", f"x [ - {k - 1} : ]", f"x [ - {k} : - 1 ]") for k in range(2, 6)),
        *(_whole(f"chop {k}", f"x [ : - {k} ]", f"x [ : - {k + 1} ]") for k in range(1, 4)),
        _whole("reverse", "x [ : : - 1 ]", "x [ : : - 2 ]"),
        _whole("sort", "sorted ( x )", "sorted ( x ) [ 1 : ]"),
        _whole("unique", "sorted ( set ( x ) )", "sorted ( x )"),
        _whole("alternate", "x [ : : 2 ]", "x [ 1 : : 2 ]"),
        _whole("twice", "x + x", "x + x [ 1 : ]"),
    )


def compile_line(line: str) -> Callable[[Values], Values]:
    """The function from `x` to `x` that a line of this module's own table is (trusted text, run here)."""
    namespace: dict[str, Callable[[Values], Values]] = {}
    exec(f"def apply(x):\n    {line}\n    return x\n", namespace)
    return namespace["apply"]
