"""Checks of values that callers give, made before anything starts.

Owns: how a wrong value is told. Invariant: a value that passes has its declared type, and a text that passes can be
handed to the kernel: structs check neither by themselves when they are made from Python.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from sandbox.errors import ConfigError


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, Any], ...]:
    return tuple((field.name, field.type) for field in msgspec.structs.fields(kind))


def check_fields(struct: msgspec.Struct, section: str) -> None:
    """Refuses a field whose value is not of its declared type.

    Raises:
        ConfigError: names `section` and the field.
    """
    for name, kind in _fields(type(struct)):
        value = getattr(struct, name)
        if type(value) is kind:
            continue
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            raise ConfigError(f"{section}.{name}", value, f"must be a {kind.__name__}")
        try:
            msgspec.convert(value, kind, builtin_types=(bytes, bytearray, memoryview))
        except msgspec.ValidationError as error:
            raise ConfigError(f"{section}.{name}", value, _explain(kind, str(error))) from None


def _explain(kind: Any, words: str) -> str:
    """What msgspec says, in Python's names instead of JSON's."""
    if get_origin(kind) is Literal:
        return f"must be one of {', '.join(map(str, get_args(kind)))}"
    for json_name, name in (("array", "tuple"), ("object", "dict"), ("null", "None")):
        words = words.replace(f"`{json_name}", f"`{name}").replace(f"{json_name}`", f"{name}`")
    return words.replace("Expected", "must be", 1)


def check_text(field: str, value: str) -> None:
    """Refuses a text that the kernel cannot be given.

    Raises:
        ConfigError: it has a NUL, or half of a character, as models may write it. (Bytes that are no text may stand in
            it as Python's `surrogateescape` has them.)
    """
    if "\0" in value:
        raise ConfigError(field, value, "must not contain NUL")
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ConfigError(field, value, "must be valid Unicode, without lone surrogates") from None


def check_variables(field: str, variables: dict[str, str]) -> None:
    """Refuses environment variables that the kernel cannot be given.

    Raises:
        ConfigError: names the field and the variable.
    """
    for name, value in variables.items():
        if not name or "=" in name:
            raise ConfigError(field, name, "a variable's name must not be empty or contain '='")
        check_text(field, name)
        check_text(f"{field}.{name}", value)


def check_count(field: str, value: object, low: int, high: int) -> None:
    """Refuses what is not a whole number of that range.

    Raises:
        ConfigError: names the field and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(field, value, f"must be a whole number between {low} and {high}")
