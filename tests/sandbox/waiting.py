"""Waiting for what no event tells: the process table, a cgroup's counters."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

_PAUSE_S = 0.005


async def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    """Looks again and again, with the loop running; TimeoutError when it does not come true."""
    with anyio.fail_after(limit_s):
        while True:
            if condition():
                return
            await anyio.sleep(_PAUSE_S)


def wait_until(condition: Callable[[], bool], limit_s: float = 10) -> float:
    """The same without a loop; returns how many seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, f"still not so after {limit_s} s"
        time.sleep(_PAUSE_S)
    return time.monotonic() - started
