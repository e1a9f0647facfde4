"""The one `Task` struct, whatever format a task came from.

Invariant: a task is immutable plain data. What the policy may see (`prompt`, `files`,
`visible_tests`) and what only the verifier may see (`hidden_tests`, `oracle`) are separate fields.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

Data = Any
"""Plain data: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict of plain data."""


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call of the entry point and what it must return.

    Example: `Case(args="[[1, 2], 3]", expected="[4, 5]")`.
    """

    args: str
    """Positional arguments: a Python literal of a list."""
    expected: str
    """Expected result: a Python literal."""
    atol: float | None = None
    """Overrides the set's tolerance for this case."""


class CaseTests(msgspec.Struct, frozen=True, kw_only=True, tag="cases", forbid_unknown_fields=True):
    """Function-style tests that are plain data: judged in the engine by comparison alone."""

    cases: tuple[Case, ...]
    atol: float = 0.0
    """Floats may differ by this much (or 1e-6 relative, whichever is larger); 0 for exact."""
    materialize: bool = False
    """Results that are iterators are listed before they are compared (generator functions)."""


class CodeTests(msgspec.Struct, frozen=True, kw_only=True, tag="code", forbid_unknown_fields=True):
    """Function-style tests that are Python code of the task's author.

    The code runs in a judge process, in a sandbox of its own; each name in `entry_points` is bound
    there to a proxy that asks the candidate process, with plain data both ways. The tests pass when
    every snippet runs to its end without an exception.
    """

    snippets: tuple[str, ...]
    """Each is one test: separately run and counted."""
    setup: str = ""
    """Runs once before the snippets, in the same namespace, and must not call an entry point."""
    mutates: bool = False
    """What the submission does to its mutable arguments (an in-place sort) is done to the tests' own as well.
    Off by default: with it, a submission can change what a later line of the test computes from them."""


Tests: TypeAlias = CaseTests | CodeTests


class TaskLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one episode and one verdict of this task may use."""

    verify_timeout_s: float = 10.0
    """Seconds for one test set (visible or hidden) of one submission: of its own CPU time, unless
    `verify_cpu_s` says otherwise, and on the clock with some slack for a busy host (`wall_factor`)."""
    verify_cpu_s: float | None = None
    """CPU seconds for one test set; None for `verify_timeout_s`."""
    memory_bytes: int = 512 * 1024 * 1024
    max_turns: int = 1
    """1: single-turn; more: the error text of a failed turn is the next observation."""
    episode_timeout_s: float = 600.0


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One executable task."""

    id: str
    """Unique in its set, `family/name`."""
    prompt: str
    """What the policy is asked, as the user's message (or the raw prompt text)."""
    entry_points: tuple[str, ...] = ()
    """Names that the submission must define, for function-style tests."""
    visible_tests: Tests | None = None
    """Tests whose failures the policy may see."""
    hidden_tests: Tests | None = None
    """Tests that decide the reward; never in the episode's sandbox."""
    prefix: str = ""
    """Python source put before the submission when it is judged (imports, HumanEval's header)."""
    oracle: str | None = None
    """A known solution: the submission's text."""
    known_wrong: tuple[str, ...] = ()
    """Submissions that must earn nothing."""
    image: str = "python"
    """Image of the candidate's sandbox."""
    limits: TaskLimits = TaskLimits()
    domain: str = "code"
    difficulty: str = ""
    split: str = "train"
    """`train` or `heldout`."""
    metadata: dict[str, str] = {}
    wrapper: str = ""
    """Python source around the submission, with `{submission}` once, alone on its line: each line of the
    submission (dedented) is put there with the placeholder's indentation. Empty: the submission alone."""
