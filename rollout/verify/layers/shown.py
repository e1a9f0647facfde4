"""Bounded texts of values that may come from anyone.

Invariant: whatever was decoded, a text comes of it; nothing here raises.
"""

from __future__ import annotations

import reprlib
from typing import Any

from rollout.verify.guest.codec import KINDS

_MAX_SHOWN = 600


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 8
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 30
        self.maxstring = self.maxother = self.maxlong = 300

    def repr_Unhashed(self, value: Any, level: int) -> str:
        items = ", ".join(self.repr1(item, level - 1) for item in value.items[:30])
        return KINDS[value.kind] + f"([{items}])"

    def repr_Listed(self, value: Any, level: int) -> str:
        return f"an iterator of {self.repr1(value.items, level - 1)}"

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # too many digits to print
            return f"<an int of {value.bit_length()} bits>"


def shown(value: Any) -> str:
    """A bounded text of a decoded value."""
    try:
        return cut(_Shown().repr(value), _MAX_SHOWN)
    except Exception as error:  # noqa: BLE001 - a text about a verdict must not decide over the engine
        return f"<{type(value).__name__}: {type(error).__name__}>"


def cut(text: str, length: int) -> str:
    """The text, its end left out where it is longer than `length`."""
    return text if len(text) <= length else text[: length - 1] + "…"
