"""How many jails of a key have been in use at once lately.

Owns: two highest marks per key. Invariant: a mark is forgotten one to two windows after it was last reached, without a
timer: whoever asks brings the time.
"""

from __future__ import annotations

from sandbox.jail import JailKey


class Demand:
    """Highest use per key, over the last one or two windows of `window_s`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = max(window_s, 1e-3)
        self._marks: dict[JailKey, tuple[int, int, int]] = {}  # window number, highest in it, highest in the one before

    def used(self, key: JailKey, count: int, now_s: float) -> None:
        """So many are in use now."""
        window, now, before = self._turned(key, now_s)
        self._marks[key] = (window, max(now, count), before)

    def peak(self, key: JailKey, now_s: float) -> int:
        """The highest number lately."""
        _, now, before = self._turned(key, now_s)
        return max(now, before)

    def _turned(self, key: JailKey, now_s: float) -> tuple[int, int, int]:
        window = int(now_s // self._window_s)
        then, now, before = self._marks.get(key, (window, 0, 0))
        if then == window:
            return window, now, before
        return window, 0, now if then == window - 1 else 0

    def forget(self, now_s: float) -> None:
        """Drops the keys that nobody has used for two windows."""
        self._marks = {key: mark for key, mark in self._marks.items() if self.peak(key, now_s)}
