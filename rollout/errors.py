"""Faults of the engine, and the one place where foreign exceptions become them.

    RolloutError
    ├── ConfigError       a setting, a task row or an argument is wrong: before anything starts
    └── Fault             ours, at run time: retried, then the one sample is refilled or masked
        ├── SandboxFault  the sandbox layer failed
        ├── SamplerFault  the policy server failed, or answered nonsense
        ├── VerifierFault the judge failed (the graded program's failures are verdicts)
        ├── JournalFault  the run directory cannot be written or is damaged
        ├── LearnerFault  the learner or the lane to it failed
        └── RunFault      too many of the above: the run stops and names the root cause

What the policy did is an outcome: a value with a reward. A fault never becomes a reward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RolloutError(Exception):
    """Base of everything that `rollout` raises on purpose."""


class ConfigError(RolloutError):
    """A value given by the user cannot be used; raised before anything has started.

    Args:
        field: the offending field, dotted, with its file and line where there is one.
        value: the value that was given.
        remedy: what to write instead.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} = {value!r}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class Fault(RolloutError):
    """A failure of ours at run time; the policy neither sees it nor is rewarded for it."""


class SandboxFault(Fault):
    """The sandbox layer failed under an episode or a verdict."""


class SamplerFault(Fault):
    """The policy server could not be reached, timed out, or broke its contract."""


class VerifierFault(Fault):
    """The judging side failed, so there is no verdict."""


class JournalFault(Fault):
    """The run directory cannot be written, or what it holds is damaged."""


class LearnerFault(Fault):
    """The learner process, or the lane to it, failed."""


class RunFault(Fault):
    """Faults passed the configured fraction of attempts; the cause is the last of them."""


@contextmanager
def boundary(kind: type[Fault], doing: str, *foreign: type[Exception]) -> Iterator[None]:
    """Turns the `foreign` exceptions of one component into one `kind` of fault, once, with cause.

    Args:
        kind: the fault to raise.
        doing: what was being done, for the message (`starting a sandbox for task X`).
        foreign: exception types to wrap; faults that are already ours pass through.
    """
    try:
        yield
    except Fault:
        raise
    except foreign as error:
        raise kind(f"{doing}: {type(error).__name__}: {error}") from error
