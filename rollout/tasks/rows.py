"""Reads rows of JSONL task files, gzipped or not, and checks their fields.

Invariant: whatever is wrong with a row is a `ConfigError` that names file, line and field.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from rollout.errors import ConfigError
from rollout.files import read_lines

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands."""

    path: Path
    line: int
    fields: dict[str, Any]

    def error(self, field: str, value: object, remedy: str) -> ConfigError:
        """The error that names this row's `field`."""
        shown = value if len(repr(value)) <= 100 else repr(value)[:100] + "…"
        return ConfigError(f"{self.path}:{self.line}: {field}", shown, remedy)

    def get(self, field: str, kind: type[T]) -> T:
        """The field's value; ConfigError when it is missing or of another type."""
        if field not in self.fields:
            raise self.error(field, None, "this field is missing")
        value = self.fields[field]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise self.error(field, value, f"must be of type {kind.__name__}, not {type(value).__name__}")
        return value

    def python(self, field: str, text: str | None = None) -> ast.Module:
        """The field's value (or a `text` made from it) parsed as Python, without its warnings."""
        text = self.get(field, str) if text is None else text
        with warnings.catch_warnings(action="ignore"):
            try:
                return ast.parse(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise self.error(field, text, f"is no Python: {error}") from None

    def texts(self, field: str) -> list[str]:
        """The field's value, a list of strings."""
        value: list[Any] = self.get(field, list)
        if not all(isinstance(item, str) for item in value):
            raise self.error(field, value, "must be a list of strings")
        return value


def read_rows(path: Path, field: str = "tasks") -> Iterator[Row]:
    """Every row of a JSONL file, gzipped or not; blank lines are passed over.

    Args:
        path: which file.
        field: what it was given for, for the error when it cannot be read at all.
    """
    for number, line in read_lines(path, field):
        try:
            fields = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}", line[:80], f"is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}:{number}", fields, "must be a JSON object")
        yield Row(path, number, fields)
