"""The visible tests: what the policy may know, and may be told the failures of."""

from __future__ import annotations

from rollout.tasks.types import Task, Tests

NAME = "visible"
VERSION = 1


def tests_of(task: Task) -> Tests | None:
    """The task's visible tests, or None when it has none."""
    return task.visible_tests
