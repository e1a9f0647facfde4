"""Reads a TOML file into a config struct and says exactly what is wrong where it cannot.

Invariant: a file is either wholly accepted or refused with the field, the value and a remedy;
unknown fields are refused, with the nearest known name as a suggestion.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollout.errors import ConfigError
from sandbox import errors as sandbox_errors

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def load_toml(path: Path, kind: type[T]) -> T:
    """Decodes the TOML file at `path` into `kind`.

    Raises:
        ConfigError: the file is missing, is no TOML, or a field is unknown or out of range.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("config", str(path), "there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"cannot be read: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("config", str(path), f"is not valid TOML: {error}") from error
    return convert(data, kind, where=str(path))


def convert(data: dict[str, Any], kind: type[T], *, where: str) -> T:
    """Converts plain data into the struct `kind`; `where` names the source in the error."""
    try:
        return msgspec.convert(data, kind)
    except (ConfigError, sandbox_errors.ConfigError) as error:
        raise ConfigError(f"{where}: {error.field}", error.value, error.remedy) from error
    except msgspec.ValidationError as error:
        raise _explain(str(error), data, kind, where) from error


def _explain(message: str, data: dict[str, Any], kind: type[msgspec.Struct], where: str) -> ConfigError:
    at = _PATH.search(message)
    path = [part for part in (at.group(1) if at else "").split(".") if part]
    reason = _PATH.sub("", message)
    unknown = _UNKNOWN.search(message)
    if unknown:
        name = unknown.group(1)
        known = _fields_at(kind, path)
        near = difflib.get_close_matches(name, known, n=1)
        remedy = f"unknown field; did you mean `{near[0]}`?" if near else f"unknown field; known: {', '.join(known)}"
        return ConfigError(f"{where}: {'.'.join([*path, name])}", _value_at(data, [*path, name]), remedy)
    return ConfigError(f"{where}: {'.'.join(path) or 'file'}", _value_at(data, path), reason)


def _fields_at(kind: type[msgspec.Struct], path: list[str]) -> list[str]:
    """Names of the fields of the struct that `path` leads to, starting at `kind`."""
    current: Any = kind
    for part in path:
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(current)}
        current = next((arm for arm in _arms(fields.get(part)) if _is_struct(arm)), None)
        if current is None:
            return []
    return [field.encode_name for field in msgspec.structs.fields(current)]


def _arms(annotation: Any) -> tuple[Any, ...]:
    return getattr(annotation, "__args__", None) or (annotation,)


def _is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def _value_at(data: Any, path: list[str]) -> Any:
    for part in path:
        if not isinstance(data, dict) or part not in data:
            return None
        data = data[part]
    return data if not isinstance(data, dict) else "{…}"
