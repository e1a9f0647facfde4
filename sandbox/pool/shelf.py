"""Idle jails that wait for their next tenant.

Owns: which jails are idle, and since when. Invariant: a jail is on the shelf at most once; the one used last is taken
first (its memory is warm, and the oldest can be seen to be too many), and what was idle for longest gives way first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from sandbox.jail import Jail, JailKey

_CHOICE = 64
"""Jails that are looked at for one that needs no new mounts."""


class Shelf:
    """Idle jails by key. The jails are compared by identity."""

    def __init__(self) -> None:
        self._lines: dict[JailKey, OrderedDict[int, tuple[Jail, float]]] = {}
        self._order: OrderedDict[int, JailKey] = OrderedDict()  # over all keys, the longest idle first

    def __len__(self) -> int:
        return len(self._order)

    def count(self, key: JailKey) -> int:
        """Idle jails of that key."""
        return len(self._lines.get(key, ()))

    def put(self, key: JailKey, jail: Jail, now_s: float) -> None:
        """Lays a jail down."""
        assert id(jail) not in self._order
        self._lines.setdefault(key, OrderedDict())[id(jail)] = (jail, now_s)
        self._order[id(jail)] = key

    def take(self, key: JailKey, suits: Callable[[Jail], bool] = lambda _: True) -> Jail | None:
        """A jail of that key, or None: one that `suits` among those used last, else the one used last of all."""
        line = self._lines.get(key)
        if not line:
            return None
        latest = islice(reversed(line.items()), _CHOICE)
        number = next((number for number, (jail, _) in latest if suits(jail)), next(reversed(line)))
        return self._remove(key, number)

    def remove(self, jail: Jail) -> bool:
        """Takes that jail out; False where it is not here."""
        key = self._order.get(id(jail))
        if key is None:
            return False
        self._remove(key, id(jail))
        return True

    def take_oldest(self) -> tuple[JailKey, Jail] | None:
        """The jail that has been idle for longest, of whichever key, or None."""
        if not self._order:
            return None
        number, key = next(iter(self._order.items()))
        return key, self._remove(key, number)

    def take_expired(self, now_s: float, idle_s: float, spared: dict[JailKey, int]) -> list[tuple[JailKey, Jail]]:
        """Jails that have been idle for `idle_s` or longer, but for as many of each key as are `spared`."""
        gone = []
        for key, line in list(self._lines.items()):
            while len(line) > spared.get(key, 0):
                number, (_, since_s) = next(iter(line.items()))
                if now_s - since_s < idle_s:
                    break
                gone.append((key, self._remove(key, number)))
        return gone

    def next_expiry_s(self, idle_s: float, spared: dict[JailKey, int]) -> float | None:
        """When `take_expired` finds the next one; None: never, if nothing comes."""
        firsts = [next(iter(line.values()))[1] for key, line in self._lines.items() if len(line) > spared.get(key, 0)]
        return min(firsts) + idle_s if firsts else None

    def take_all(self) -> list[Jail]:
        """Empties the shelf."""
        gone = [jail for line in self._lines.values() for jail, _ in line.values()]
        self._lines.clear()
        self._order.clear()
        return gone

    def _remove(self, key: JailKey, number: int) -> Jail:
        line = self._lines[key]
        jail, _ = line.pop(number)
        del self._order[number]
        if not line:
            del self._lines[key]
        return jail
