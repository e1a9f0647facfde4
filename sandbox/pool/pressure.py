"""How much the machine has left: free memory, and how long its tasks stand still (PSI).

Owns: the last look. Invariant: it costs no thread and never waits: the kernel answers from counters, in microseconds;
and it is taken at most once in `FRESH_S`. A machine that does not tell is taken to be at ease.
"""

from __future__ import annotations

import re

import msgspec

from sandbox.cgroup import files

FRESH_S = 0.1
_FULL = re.compile(r"full avg10=(\d+\.\d+)")
_AVAILABLE = re.compile(r"MemAvailable:\s*(\d+) kB")


class Pressure(msgspec.Struct, frozen=True, kw_only=True):
    """One look; None where the machine does not tell."""

    free_bytes: int | None = None
    """Memory that can be had without swapping."""
    memory: float | None = None
    io: float | None = None
    """Share of the last ten seconds in which no task went on, for want of memory, of input or output."""


class Gauge:
    """Looks at the machine.

    Args:
        proc: where /proc is mounted.
    """

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._last = Pressure()
        self._fresh_until_s = float("-inf")

    def look(self, now_s: float) -> Pressure:
        """How things stand, at most `FRESH_S` ago."""
        if now_s >= self._fresh_until_s:
            self._fresh_until_s = now_s + FRESH_S
            free_kib = self._find("meminfo", _AVAILABLE)
            memory, io = self._find("pressure/memory", _FULL), self._find("pressure/io", _FULL)
            self._last = Pressure(
                free_bytes=None if free_kib is None else int(free_kib) * 1024,
                memory=None if memory is None else memory / 100,
                io=None if io is None else io / 100,
            )
        return self._last

    def _find(self, name: str, pattern: re.Pattern[str]) -> float | None:
        try:
            found = pattern.search(files.read(f"{self._proc}/{name}"))
        except OSError:  # a kernel without PSI, or a container that hides it
            return None
        return None if found is None else float(found[1])
