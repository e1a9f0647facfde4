"""The environment of code tasks: each action submits a program.

With one turn, the first action is the submission. With more, the visible tests run in a sandbox
after each action, and what failed goes back as the next observation, until they pass or the turns
are used up.

Invariant: the policy reads visible evidence and nothing else; observations are bounded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from rollout.environment.types import LiveEnvironment, Reaction
from rollout.errors import ConfigError, SandboxFault, boundary
from rollout.tasks.submission import extract_submission
from rollout.tasks.types import Task
from rollout.types import LayerVerdict
from sandbox.errors import SandboxError

NO_PROGRAM = "Your answer holds no program. Answer with the whole program in one ```python code block."
_ASK_AGAIN = "Correct the program and answer with the whole of it in one ```python code block."


class VisibleRunner(Protocol):
    """Runs the tests that the policy may see; the verifier does."""

    async def run_visible(self, task: Task, submission: str) -> LayerVerdict:
        """Verdict of the visible layer, from a fresh sandbox.

        Raises:
            Fault: ours.
        """
        ...


class CodeEnvironmentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `CodeEnvironment`."""

    max_turns: int | None = None
    """Overrides every task's own `limits.max_turns`; None keeps it."""
    max_observation_chars: int = 2_000
    """Longer evidence keeps its head and its tail."""

    def __post_init__(self) -> None:
        if self.max_turns is not None and not 1 <= self.max_turns <= 10_000:
            raise ConfigError("environment.max_turns", self.max_turns, "must lie between 1 and 10000")
        if self.max_observation_chars < 100:
            raise ConfigError("environment.max_observation_chars", self.max_observation_chars, "must be 100 or more")


class CodeEnvironment:
    """`Environment` of code tasks.

    Args:
        runner: runs visible tests.
        config: turns and bounds.
    """

    def __init__(self, runner: VisibleRunner, config: CodeEnvironmentConfig | None = None) -> None:
        self._runner = runner
        self._config = config or CodeEnvironmentConfig()

    def max_turns(self, task: Task) -> int:
        """See `Environment.max_turns`; without visible tests there is nothing to tell, so one."""
        if task.visible_tests is None:
            return 1
        return max(1, self._config.max_turns or task.limits.max_turns)

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[LiveEnvironment]:
        """See `Environment.open`."""
        yield _LiveCode(self._runner, task, self._config.max_observation_chars)


class _LiveCode:
    """One episode: stateless between turns, since every program runs in a fresh sandbox."""

    def __init__(self, runner: VisibleRunner, task: Task, max_chars: int) -> None:
        self._runner = runner
        self._task = task
        self._max_chars = max_chars

    async def act(self, action: str, *, last: bool) -> Reaction:
        submission = extract_submission(action)
        if last:
            return Reaction(done=True, submission=submission)
        if submission is None:
            return Reaction(done=False, observation=NO_PROGRAM)
        with boundary(SandboxFault, f"running the visible tests of {self._task.id}", SandboxError, OSError):
            visible = await self._runner.run_visible(self._task, submission)
        if visible.passed:
            return Reaction(done=True, submission=submission, visible=visible)
        observation = failure_text(visible, self._max_chars)
        return Reaction(done=False, observation=observation, submission=submission, visible=visible)


def failure_text(visible: LayerVerdict, max_chars: int) -> str:
    """What the policy is told about a program that failed its visible tests."""
    failed = [f"{test.name}: {test.detail}".rstrip(": \n") for test in visible.tests if not test.passed]
    details = "\n".join(failed) or visible.evidence
    count = f"{visible.num_passed} of {visible.num_tests} visible tests passed."
    return f"{count}\n{shorten(details, max_chars)}\n{_ASK_AGAIN}"


def shorten(text: str, max_chars: int) -> str:
    """The text, or its head and tail with the number of characters left out between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
