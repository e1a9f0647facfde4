"""The command that is a session's shell, and what a process knows of its session. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sandbox.types import Command


class Shell(Command, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A shell with a holder beside it, whose socket is the last of the passed descriptors."""

    whole_env: bool = False
    """Is `env` all that it gets, without the sandbox's own variables?"""
    terminal: bool = False
    """Is the descriptor before the last one to become its controlling terminal?"""


class Companion(Protocol):
    """Who else has descriptors for a running command, and wants to know of its end."""

    @property
    def idle(self) -> bool:
        """Does the command wait for work, and nothing else?"""

    def ended(self) -> None:
        """Told once; must not block."""

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""


class Companionable(Protocol):
    """A `Process`, as far as its session is concerned."""

    companion: Companion | None


def num_busy(processes: Iterable[Companionable]) -> int:
    """How many do something: a session's shell between two runs does not."""
    return sum(process.companion is None or not process.companion.idle for process in processes)
