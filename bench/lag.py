"""How long the event loop was not free: a heartbeat on the loop, and how late each beat came.

Invariant: `lags_s` are wall times; `stalls_s` leave out what the loop's thread spent waiting for a CPU that other
processes had, as the kernel counts it (where it does not, they equal the lags), so that they show what our own code and
our own system calls held up. There is at least one of each.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from types import TracebackType
from typing import Self

BEAT_S = 0.001


class LagProbe:
    """Beats on the running loop inside `with`; use it in the loop's own thread."""

    def __init__(self, beat_s: float = BEAT_S) -> None:
        self._beat_s = beat_s
        self.lags_s: list[float] = []
        self.stalls_s: list[float] = []

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._schedstat = _open_schedstat()
        self._due = time.perf_counter() + self._beat_s
        self._waited_s = self._queue_wait_s()
        self._timer = self._loop.call_later(self._beat_s, self._beat)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._note()
        if self._schedstat is not None:
            os.close(self._schedstat)

    def _beat(self) -> None:
        self._note()
        self._due = time.perf_counter() + self._beat_s
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    def _note(self) -> None:
        waited_s = self._queue_wait_s()
        lag_s = max(0.0, time.perf_counter() - self._due)
        self.lags_s.append(lag_s)
        self.stalls_s.append(max(0.0, lag_s - (waited_s - self._waited_s)))
        self._waited_s = waited_s

    def _queue_wait_s(self) -> float:
        """Seconds that this thread has ever waited on a run queue."""
        if self._schedstat is None:
            return 0.0
        return int(os.pread(self._schedstat, 128, 0).split()[1]) / 1e9


def _open_schedstat() -> int | None:
    try:
        return os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
