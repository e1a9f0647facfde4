"""From how a run ended to its outcome. Pure functions."""

from __future__ import annotations

from typing import NamedTuple

from sandbox.cgroup.types import Reading
from sandbox.checking import check_text
from sandbox.commands.outcome import Observed, classify, end_signal, exit_code
from sandbox.errors import ConfigError
from sandbox.sessions.streams import Kept
from sandbox.types import MIB, Command, Outcome, Reason, Usage

MAX_SCRIPT_BYTES = 1 * MIB
_FLOOD_FACTOR = 64
_SPOILED = b"rollout: the shell's own descriptor was written to; the session was ended\n"


class End(NamedTuple):
    """How a run ended."""

    status: int
    """As wait(2) gives it."""
    killed_for: Reason | None = None
    """Why we ended it, if we did."""
    disk_full: bool = False
    cpu_us: int | None = None
    """Of the shell and the children that it waited for, since its start; None where nobody tells."""
    spoiled: bool = False
    """Did somebody speak in the shell's place?"""


def checked(
    script: str, timeout_s: float, stdin: bytes, output_limit_bytes: int, kill_output_bytes: int | None
) -> Command:
    """How the script is to be run; ConfigError where it cannot be."""
    if not isinstance(script, str):
        raise ConfigError("session.script", type(script).__name__, "must be a string")
    check_text("session.script", script)
    if (size := len(script.encode("utf-8", "surrogateescape"))) > MAX_SCRIPT_BYTES:
        raise ConfigError("session.script", f"{size} bytes", "at most 1 MiB; write a file and run that")
    return Command(
        argv=("script",),
        stdin=stdin,
        timeout_s=timeout_s,
        output_limit_bytes=output_limit_bytes,
        kill_output_bytes=kill_output_bytes,
    )


def flood_bytes(how: Command) -> int:
    """Of one stream, before the run is ended."""
    return how.kill_output_bytes or max(MIB, how.output_limit_bytes * _FLOOD_FACTOR)


def why_killed(outcome: Outcome) -> Reason | None:
    """Why the engine killed the shell itself: it was closed, or a day is over."""
    return outcome.reason if outcome.reason in (Reason.KILLED, Reason.TIMEOUT) else None


def make_usage(before: Reading, after: Reading, wall_s: float, cpu_us: int, peak: int | None) -> Usage:
    """What a run used: by its cgroup's counters, else as the holder tells (`cpu_us`)."""
    if after.cpu_us is not None and before.cpu_us is not None:
        cpu_us = after.cpu_us - before.cpu_us
    return Usage(
        wall_s=wall_s,
        cpu_s=cpu_us / 1e6,
        peak_memory_bytes=peak or 0,
        peak_scope="process" if peak is None else "sandbox",
        oom_kills=after.oom_kills - before.oom_kills,
    )


def make_outcome(
    end: End, kept: tuple[Kept, Kept], usage: Usage, pids_refused: int, unenforced: tuple[str, ...]
) -> Outcome:
    """The outcome: our own reason first, then what counters and status show."""
    seen = Observed(
        status=end.status,
        killed_for=None,
        oom_kills=usage.oom_kills,
        pids_refused=pids_refused,
        disk_full=end.disk_full,
        cpu_s=usage.cpu_s,
        cpu_limit_s=None,
        unenforced=unenforced,
    )
    (stdout, stdout_lost), (stderr, stderr_lost) = kept
    return Outcome(
        reason=end.killed_for or classify(seen),
        exit_code=exit_code(end.status),
        signal=end_signal(end.status),
        stdout=stdout,
        stderr=stderr + _SPOILED if end.spoiled else stderr,
        stdout_truncated_bytes=stdout_lost,
        stderr_truncated_bytes=stderr_lost,
        usage=usage,
        unenforced=unenforced,
    )
