"""One line in the log `sandbox.audit`, at level INFO, for every sandbox that was handed out and has ended.

The message is one JSON object, the fields of `Lease`: who had it (`engine_pid`), which it was (`number`, unique among
the living ones of that engine; `host_uid`), what it was made of (`jail`, `image`, `limits`), what this host could not
enforce (`unenforced`), how long it was waited for (`waited_s`: a place, a turn and the building), from when to when it
was in use (`started`, `ended`: UTC, ISO 8601), how many commands ran in it (`num_commands`) and how it ended
(`ending`: `closed` by its owner, or `died`, with `why`). To keep the lines, add a handler to that logger and set its
level to INFO. Invariant: a line comes after everything of its sandbox is gone, or has been given up; writing it never
raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Literal

import msgspec

from sandbox.types import JailName, Limits, SandboxSpec

LOG_NAME = "sandbox.audit"


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What one line says."""

    engine_pid: int
    number: int
    host_uid: int
    """Whom its processes belonged to on the host; the engine's own uid where there was none to give."""
    jail: JailName
    image: str
    limits: Limits
    unenforced: tuple[str, ...]
    waited_s: float
    started: str
    ended: str
    num_commands: int
    ending: Literal["closed", "died"]
    why: str


class Audit:
    """The audit of one sandbox. Make it when the sandbox is handed out; `end` writes the line.

    Args:
        waited_s: seconds since it was asked for.
    """

    def __init__(self, number: int, host_uid: int, spec: SandboxSpec, waited_s: float = 0.0) -> None:
        self._number = number
        self._host_uid = host_uid
        self._spec = spec
        self._waited_s = waited_s
        self._started = datetime.now(UTC)

    def end(self, unenforced: Sequence[str], num_commands: int, why_died: str | None) -> None:
        """Writes the line where somebody listens.

        Args:
            why_died: None for a sandbox that was closed by its owner.
        """
        log = logging.getLogger(LOG_NAME)
        # Handlers and filters are the embedder's code, and a full disk under one must not end an engine.
        with suppress(Exception):
            if log.isEnabledFor(logging.INFO):
                log.info("%s", msgspec.json.encode(self._lease(tuple(unenforced), num_commands, why_died)).decode())

    def _lease(self, unenforced: tuple[str, ...], num_commands: int, why_died: str | None) -> Lease:
        return Lease(
            engine_pid=os.getpid(),
            number=self._number,
            host_uid=self._host_uid,
            jail=self._spec.jail,
            image=_printable(self._spec.image),
            limits=self._spec.limits,
            unenforced=unenforced,
            waited_s=round(self._waited_s, 6),
            started=_iso(self._started),
            ended=_iso(datetime.now(UTC)),
            num_commands=num_commands,
            ending="closed" if why_died is None else "died",
            why=_printable(why_died or ""),
        )


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")


def _printable(words: str) -> str:
    """A path may hold bytes that are no text; JSON must not."""
    return words.encode(errors="backslashreplace").decode()
