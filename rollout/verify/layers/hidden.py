"""The hidden tests: what decides the reward; never in an episode's sandbox, never shown to the policy."""

from __future__ import annotations

from rollout.tasks.types import Task, Tests

NAME = "hidden"
VERSION = 1


def tests_of(task: Task) -> Tests | None:
    """The task's hidden tests, or None when it has none."""
    return task.hidden_tests
