"""Settings of verification.

Invariant: only how verdicts are reached, never what they are, depends on these, with the one
exception of `reward_rule`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rollout.errors import ConfigError

MIB = 1024 * 1024


class VerifierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How submissions are judged."""

    concurrency: int = 8
    """Verdicts in progress at once, each with one candidate sandbox."""
    retries: int = 2
    """Further tries after a fault of ours, before the verdict is `Invalid`."""
    reward_rule: Literal["all", "fraction"] = "all"
    """From the deciding layer (hidden; visible where a task has no hidden tests): `all` is 1.0 if and only if
    every test passed, else 0.0; `fraction` is the fraction of its tests that passed."""
    layers: tuple[Literal["visible", "hidden"], ...] = ("visible", "hidden")
    """Layers that `verify` runs, in order; the deciding one always runs."""
    reuse_verdicts: bool = False
    """Hand the earlier verdict to a byte-identical submission of the same task; said in its evidence."""
    reuse_capacity: int = 10_000
    """Verdicts kept for reuse; the least recently used goes first."""
    wall_factor: float = 3.0
    """A test set may take `verify_timeout_s` of the submission's own CPU time (or the task's `verify_cpu_s`), and this
    many times `verify_timeout_s` on the clock: a busy host must not change a verdict."""
    startup_timeout_s: float = 60.0
    """From asking for a sandbox to its first word, before any submitted code has run; over it is a fault."""
    judge_grace_s: float = 5.0
    """How long after a test set's deadline the judge may take to report."""
    max_reply_bytes: int = 4 * MIB
    """Largest encoded result of one call; larger is an error of the submission."""
    max_submission_bytes: int = 256 * 1024
    """Longer submissions fail without being run."""
    judge_image: str = "python"
    judge_job_memory_bytes: int = 256 * MIB
    """For the test code of one test set. Over it a test fails with a MemoryError: it is what became of the submission's
    data. The judge's sandbox may use as much for each of `concurrency` jobs and once more for itself, so no
    submission can make the kernel end the jobs of others."""

    def __post_init__(self) -> None:
        for field, low, high in (
            ("concurrency", 1, 4096),
            ("retries", 0, 100),
            ("reuse_capacity", 1, 10_000_000),
            ("wall_factor", 1.0, 100.0),
            ("startup_timeout_s", 0.1, 3600.0),
            ("judge_grace_s", 0.1, 600.0),
            ("max_reply_bytes", 1024, 64 * MIB),
            ("max_submission_bytes", 1, 16 * MIB),
            ("judge_job_memory_bytes", 64 * MIB, 1 << 44),
        ):
            value = getattr(self, field)
            if not low <= value <= high:
                raise ConfigError(f"verify.{field}", value, f"must lie between {low} and {high}")
