"""The environment's contract: actions in, observations out.

Invariant: whatever the policy writes, an environment answers with a value; it raises only faults
of ours. State of a live episode lives in the object that `open` yields and ends with it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

import msgspec

from rollout.tasks.types import Task
from rollout.types import CommandRecord, LayerVerdict


class Reaction(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment makes of one action."""

    done: bool
    """The episode is over: there is nothing to observe any more."""
    observation: str = ""
    """What the policy is shown next; empty when done."""
    submission: str | None = None
    """The program that this action submits; None where it holds none."""
    commands: tuple[CommandRecord, ...] = ()
    visible: LayerVerdict | None = None
    """Verdict of the visible tests, where they ran."""


class LiveEnvironment(Protocol):
    """The environment of one live episode."""

    async def act(self, action: str, *, last: bool) -> Reaction:
        """Carries out one action.

        Args:
            action: the decoded text.
            last: no further turn is allowed, so an observation would be read by nobody.

        Raises:
            Fault: ours; a malformed action is an observation.
        """
        ...


class Environment(Protocol):
    """Makes the environments of episodes; one for the whole engine."""

    def max_turns(self, task: Task) -> int:
        """Most turns of one episode of `task`, at least 1."""
        ...

    def open(self, task: Task) -> AbstractAsyncContextManager[LiveEnvironment]:
        """The environment of one new episode; leaving it frees everything that it holds."""
        ...
