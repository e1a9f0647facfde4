"""Plain data as Python source and back: what `Case.args` and `Case.expected` are written in.

Invariant: `parse(render(value))` equals `value` for all plain data; `parse` calls nothing and
looks up no name but `inf`, `nan`, `set` and `frozenset`.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any

from rollout.tasks.types import CaseTests

_NAMES = {"inf": float("inf"), "nan": float("nan")}
_CALLS = {"set": set, "frozenset": frozenset, "bytearray": bytearray}


def render(value: Any) -> str:
    """Python source of plain data (`repr` is; named so that its inverse is easy to find)."""
    return repr(value)


def parse(text: str) -> Any:
    """The value of a literal; ValueError when the text is anything else."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a Python literal: {error}") from None
    return _value(tree.body)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.List(elts=items):
            return [_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item) for item in items)
        case ast.Set(elts=items):
            return {_value(item) for item in items}
        case ast.Dict(keys=keys, values=values):
            if None not in keys:
                return {_value(k): _value(v) for k, v in zip(keys, values, strict=True) if k is not None}
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            return _number(left) + _number(right) if isinstance(op, ast.Add) else _number(left) - _number(right)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _CALLS and len(arguments) < 2:
            return _CALLS[name](*map(_value, arguments))
    raise ValueError(f"not a Python literal: {ast.dump(node)[:100]}")


def _number(node: ast.expr) -> Any:
    value = _value(node)
    if isinstance(value, (int, float, complex)):
        return value
    raise ValueError(f"not a number: {ast.dump(node)[:100]}")


@lru_cache(maxsize=1024)
def parsed(tests: CaseTests) -> tuple[tuple[list[Any], Any], ...]:
    """Arguments and expected value of each case; ValueError for what is no literal."""
    cases = []
    for case in tests.cases:
        arguments = parse(case.args)
        if not isinstance(arguments, list):
            raise ValueError(f"the arguments are no list: {case.args[:100]}")
        cases.append((arguments, parse(case.expected)))
    return tuple(cases)
