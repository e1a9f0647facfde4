"""Sizes and durations as people write them, and back.

Owns: the syntax. Invariant: a text is either understood exactly or refused with the name of the place it came from,
the text itself and what to write instead; nothing is rounded into range.
"""

from __future__ import annotations

import re

from sandbox.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(iB|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_LETTERS = "KMGT"
_LONGEST = 32


def parse_size(field: str, text: str, low: int = 0, high: int = 1 << 44) -> int:
    """Bytes of `512`, `64K`, `1.5G`, `512KiB`, `10MB`: bare letters and `iB` count 1024s, `KB`, `MB` … 1000s.

    Raises ConfigError naming `field` (a flag or a config key) for another syntax or a value outside [low, high].
    """
    match = _SIZE.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise ConfigError(field, text, "must be a size such as 512KiB, 64M or 1.5G")
    number, letter, suffix = match.groups()
    base = 1000 if letter and (suffix or "").upper() == "B" else 1024
    exponent = _LETTERS.index(letter.upper()) + 1 if letter else 0
    value = float(number) * base**exponent if "." in number else int(number) * base**exponent
    if value != int(value):
        raise ConfigError(field, text, "must be a whole number of bytes")
    return int(_within(field, text, value, low, high, format_size(low), format_size(high)))


def parse_duration(field: str, text: str, low: float = 0.001, high: float = 86_400.0) -> float:
    """Seconds of `5`, `2.5s`, `500ms`, `10m`, `1h`; ConfigError as in `parse_size`."""
    match = _DURATION.fullmatch(text.strip()) if len(text) <= _LONGEST else None
    if match is None:
        raise ConfigError(field, text, "must be a duration such as 5, 500ms or 10m (seconds without a unit)")
    value = float(match[1]) * _SECONDS[match[2] or "s"]
    return _within(field, text, value, low, high, f"{low:g} s", f"{high:g} s")


def parse_count(field: str, text: str, low: int, high: int) -> int:
    """A whole number in [low, high]; ConfigError as in `parse_size`."""
    if not re.fullmatch(r"-?\d{1,18}", text.strip()):
        raise ConfigError(field, text, f"must be a whole number between {low} and {high}")
    return int(_within(field, text, int(text), low, high, str(low), str(high)))


def parse_number(field: str, text: str, low: float, high: float) -> float:
    """A decimal number in [low, high]; ConfigError as in `parse_size`."""
    if not re.fullmatch(r"-?\d{1,18}(\.\d{1,18})?", text.strip()):
        raise ConfigError(field, text, f"must be a number between {low:g} and {high:g}")
    return _within(field, text, float(text), low, high, f"{low:g}", f"{high:g}")


def format_size(num_bytes: int) -> str:
    """`512 B`, `64 KiB`, `1.5 GiB`: at most one decimal."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.1f}".removesuffix(".0") + f" {unit}"
        value /= 1024
    return f"{value:.1f}".removesuffix(".0") + " TiB"


def _within(field: str, text: str, value: float, low: float, high: float, low_text: str, high_text: str) -> float:
    if not low <= value <= high:
        raise ConfigError(field, text, f"must lie between {low_text} and {high_text}")
    return value
