"""Which jails to build, and who gets one that becomes free.

Owns: the acquires that were admitted and lack a jail, and the builds in flight. Invariant: decisions are synchronous
and do nothing but tell what to do. Every acquire that lacks a jail is tied to one build in flight that is not slow, or
stands in line for one to be started, or pauses after a failure; but whichever jail of its key comes first serves the
acquire that has lacked it for longest. So a build that is slow, stuck or failing holds up nobody: another one takes
its place, as long as not everything is slow.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from sandbox.jail import JailKey

T = TypeVar("T")


class Build(Generic[T]):
    """One jail that is being built."""

    def __init__(self, key: JailKey) -> None:
        self.key = key
        self.client: T | None = None
        """The acquire for which it stands in; None for one in store, or slow."""
        self.slow = False


class _Line(Generic[T]):
    """The acquires and builds of one key."""

    def __init__(self) -> None:
        self.lacking: dict[T, Build[T] | None] = {}  # in the order of their admission
        self.unbuilt: dict[T, None] = {}  # of these: for whom no build was started
        self.spare: deque[Build[T]] = deque()  # builds for nobody yet
        self.num_builds = 0

    @property
    def empty(self) -> bool:
        return not self.lacking and not self.num_builds


class Growth(Generic[T]):
    """Builds by demand. `T`: an acquire, compared by identity.

    Args:
        max_building: builds at once that are not slow; about as many slow ones are replaced.
    """

    def __init__(self, max_building: int) -> None:
        self._max_building = max_building
        self._lines: dict[JailKey, _Line[T]] = {}
        self.num_building = 0
        """Slow ones included."""
        self.num_slow = 0
        self._parked: deque[tuple[JailKey, T]] = deque()  # acquires whose builds are slow, as too many are already

    def _line(self, key: JailKey) -> _Line[T]:
        return self._lines.setdefault(key, _Line())

    def num_builds(self, key: JailKey) -> int:
        """Builds of that key in flight."""
        return self._lines[key].num_builds if key in self._lines else 0

    @property
    def num_unbuilt(self) -> int:
        """Acquires for which a build should be started."""
        return sum(len(line.unbuilt) for line in self._lines.values())

    @property
    def num_lacking(self) -> int:
        """Acquires that lack a jail."""
        return sum(len(line.lacking) for line in self._lines.values())

    # ------------------------------------------------------------------ acquires

    def want(self, key: JailKey, client: T, *, paused: bool = False) -> None:
        """An acquire lacks a jail. Paused, it gets none built before `want_again`."""
        line = self._line(key)
        line.lacking[client] = None
        if not paused:
            self._tie(line, client)

    def want_again(self, key: JailKey, client: T) -> None:
        """Its pause after a failure is over; does nothing where it was served meanwhile, or has gone."""
        line = self._lines.get(key)
        if line is not None and client in line.lacking and line.lacking[client] is None and client not in line.unbuilt:
            self._tie(line, client)

    def _tie(self, line: _Line[T], client: T) -> None:
        if line.spare:
            build = line.spare.popleft()
            build.client, line.lacking[client] = client, build
        else:
            line.unbuilt[client] = None

    def leave(self, key: JailKey, client: T) -> None:
        """An acquire lacks no jail any more: it was served, has failed, or was cancelled."""
        line = self._line(key)
        build = line.lacking.pop(client, None)
        line.unbuilt.pop(client, None)
        if build is not None:
            self._untie(line, build)
        self._forget(key, line)

    def _untie(self, line: _Line[T], build: Build[T]) -> None:
        """Its acquire does not need it: the next one without a build does, or it is in store."""
        build.client = None
        if line.unbuilt:
            client = next(iter(line.unbuilt))
            del line.unbuilt[client]
            build.client, line.lacking[client] = client, build
        else:
            line.spare.append(build)

    def _forget(self, key: JailKey, line: _Line[T]) -> None:
        if line.empty:
            self._lines.pop(key, None)

    def first(self, key: JailKey) -> T | None:
        """The acquire that gets the next jail of that key; it must then `leave`."""
        line = self._lines.get(key)
        return next(iter(line.lacking), None) if line else None

    # ------------------------------------------------------------------ builds

    def next_wanted(self) -> JailKey | None:
        """The key of which a build should be started for an acquire, now; the keys take turns."""
        if self.num_building - self.num_slow >= self._max_building:
            return None
        return next((key for key, line in self._lines.items() if line.unbuilt), None)

    @property
    def may_store(self) -> bool:
        """Is there a turn for a build in store? One is left for who comes next."""
        return self.num_building - self.num_slow < max(1, self._max_building - 1)

    def begin(self, key: JailKey) -> Build[T]:
        """A build starts: for the first acquire without one, else in store."""
        line = self._line(key)
        self._lines[key] = self._lines.pop(key)  # the other keys come first next time
        build: Build[T] = Build(key)
        line.num_builds += 1
        self.num_building += 1
        self._untie(line, build)
        return build

    def overdue(self, build: Build[T]) -> None:
        """It takes long: it gives up its turn, and its acquire stands in line for another."""
        if build.slow:
            return
        build.slow = True
        self.num_slow += 1
        line = self._line(build.key)
        client, build.client = build.client, None
        if client is None:
            line.spare.remove(build)
            return
        line.lacking[client] = None
        if self.num_slow <= self._max_building:
            self._tie(line, client)
        else:
            self._parked.append((build.key, client))  # enough has been started in vain

    def end(self, build: Build[T]) -> T | None:
        """It has come to its end, whatever it is; returns the acquire it was tied to, which now stands in no line.

        After a success that one must `want_again`, unless it was served; after a failure, when its pause is over.
        """
        line = self._line(build.key)
        line.num_builds -= 1
        self.num_building -= 1
        client = build.client
        if build.slow:
            self.num_slow -= 1
            while self._parked and self.num_slow <= self._max_building:
                self.want_again(*self._parked.popleft())
        elif client is None:
            line.spare.remove(build)
        else:
            line.lacking[client] = None
        self._forget(build.key, line)
        return client
