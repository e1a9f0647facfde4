"""Measures of this process and its event loop, taken so that a busy machine does not change the verdict."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio

BEAT_S = 0.005
_CONTROL = f"""
import time, sys
lags = []
print(flush=True)
end = time.monotonic() + 600
while time.monotonic() < end:
    started = time.monotonic()
    time.sleep({BEAT_S})
    lags.append(time.monotonic() - started - {BEAT_S})
    if len(lags) % 20 == 0:
        sys.stdout.write(" ".join(map(str, lags)) + "\\n"); sys.stdout.flush(); lags.clear()
"""


class Growth:
    """Peak growth of this process's resident memory, in bytes; complete after the `with` block."""

    peak_bytes = 0


def _status_bytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{field}:\s*(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def memory_growth() -> Iterator[Growth]:
    """How much this process's resident memory rises at its highest point within the block."""
    growth = Growth()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
    before = _status_bytes("VmRSS")
    yield growth
    growth.peak_bytes = _status_bytes("VmHWM") - before


class Lag:
    """Lateness of a beat on this event loop and, beside it, of a process that does nothing else, in seconds."""

    def __init__(self) -> None:
        self.loop_s: list[float] = []
        self.control_s: list[float] = []

    @property
    def excess_p99_s(self) -> float:
        """How much later than the control's worst percent the loop's worst percent comes."""
        return _p99(self.loop_s) - _p99(self.control_s)


def _p99(lags_s: list[float]) -> float:
    assert lags_s, "no beat at all"
    return sorted(lags_s)[int(len(lags_s) * 0.99)]


@asynccontextmanager
async def loop_lag() -> AsyncIterator[Lag]:
    """Measures lateness within the block; whatever makes the whole machine late shows in the control as well."""
    lag = Lag()
    control = await anyio.to_thread.run_sync(_start_control)
    assert control.stdout is not None
    with control, control.stdout:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_beat, lag.loop_s)
                yield lag
                await anyio.sleep(BEAT_S * 40)
                group.cancel_scope.cancel()
        finally:
            control.kill()
            rows = control.stdout.read().splitlines()
    lag.control_s = [float(word) for row in rows[:-1] for word in row.split()]


def _start_control() -> subprocess.Popen[str]:
    control = subprocess.Popen([sys.executable, "-I", "-S", "-c", _CONTROL], stdout=subprocess.PIPE, text=True)
    assert control.stdout is not None
    control.stdout.readline()
    return control


async def _beat(lags_s: list[float]) -> None:
    while True:
        started_s = time.monotonic()
        await anyio.sleep(BEAT_S)
        lags_s.append(time.monotonic() - started_s - BEAT_S)
