"""From what was observed to the one reason why a command ended. Pure functions.

Invariant: a reason is only given for something that was seen (our own kill, a counter's rise, a full disk at the
end), and only where its limit is enforced.
"""

from __future__ import annotations

import os
import signal

import msgspec

from sandbox.types import Reason

_CPU_PART = 0.25
"""Used at least when the kernel's limit strikes: it counts ticks, which on a busy machine run ahead of its accounts."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the classification looks at."""

    status: int
    """As wait(2) gives it."""
    killed_for: Reason | None
    """Why we killed it, if we did."""
    oom_kills: int
    pids_refused: int
    disk_full: bool
    cpu_s: float
    cpu_limit_s: float | None
    unenforced: tuple[str, ...]


def exit_code(status: int) -> int | None:
    """The code of a process that exited by itself."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def end_signal(status: int) -> int | None:
    """The signal that ended a process."""
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def classify(seen: Observed) -> Reason:
    """The reason, by precedence: our kill, out of memory, CPU time, process limit, disk, then the bare status."""
    number = end_signal(seen.status)
    if seen.killed_for is not None and number == signal.SIGKILL:
        return seen.killed_for
    if seen.status == 0:
        return Reason.EXIT
    if seen.oom_kills > 0 and "memory" not in seen.unenforced:
        return Reason.OOM
    if seen.cpu_limit_s is not None and _cpu_is_over(seen.cpu_s, seen.cpu_limit_s, number):
        return Reason.TIMEOUT
    if seen.pids_refused > 0 and "pids" not in seen.unenforced:
        return Reason.PIDS
    if seen.disk_full and number in (None, signal.SIGXFSZ, signal.SIGBUS):
        return Reason.DISK
    return Reason.EXIT if number is None else Reason.SIGNAL


def _cpu_is_over(cpu_s: float, limit_s: float, number: int | None) -> bool:
    """The signals alone do not show it: anybody may send them."""
    if number == signal.SIGXCPU:
        return cpu_s >= limit_s * _CPU_PART
    return number == signal.SIGKILL and cpu_s >= limit_s
