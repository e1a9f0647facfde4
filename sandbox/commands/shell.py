"""The command that is a session's shell, and what a process knows of its session. Pure data."""

from __future__ import annotations

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

    def ended(self) -> None:
        """Told once; must not block."""

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
