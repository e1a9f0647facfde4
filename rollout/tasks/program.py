"""Puts a submission into the program that is judged: the task's prefix and wrapper around it.

Invariant: a pure function of task and submission; nothing of a task's tests or oracle goes in.
"""

from __future__ import annotations

import textwrap

from rollout.tasks.types import Task

PLACEHOLDER = "{submission}"


def program_of(task: Task, submission: str) -> str:
    """The source that the candidate loads."""
    return task.prefix + (_wrapped(task.wrapper, submission) if task.wrapper else submission)


def _wrapped(wrapper: str, submission: str) -> str:
    """The wrapper with the placeholder's line replaced by the submission, indented as the placeholder is."""
    before, _, after = wrapper.partition(PLACEHOLDER)
    indentation = before[before.rfind("\n") + 1 :]
    body = textwrap.dedent(submission).strip("\n")
    lines = [indentation + line if line.strip() else "" for line in body.split("\n")]
    return before[: len(before) - len(indentation)] + "\n".join(lines) + after
