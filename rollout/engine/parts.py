"""What an engine is assembled from, and the bookkeeping that its episodes share.

Invariant: one `Parts` per engine; the fault budget only ever counts ended attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import anyio

from rollout.engine.config import EngineConfig
from rollout.engine.metrics import EngineMetrics
from rollout.environment.types import Environment
from rollout.errors import Fault, RunFault
from rollout.rendering.types import Renderer
from rollout.sampler.types import Sampler
from rollout.tasks.types import Task
from rollout.types import DroppedGroup, Group, Verdict


class Judge(Protocol):
    """Judges a finished episode; the verifier does."""

    async def verify(self, task: Task, submission: str | None) -> Verdict:
        """The verdict of every layer, `Invalid` where the judging side failed; None submits no program.

        Raises:
            Fault: ours.
        """
        ...


class FaultBudget:
    """Decides when so much has failed that a run must stop.

    Args:
        max_fraction: of all ended attempts, that may be faults.
        min_attempts: no decision before this many have ended.
    """

    def __init__(self, max_fraction: float, min_attempts: int) -> None:
        self._max_fraction = max_fraction
        self._min_attempts = min_attempts
        self.num_attempts = 0
        self.num_faults = 0

    def succeeded(self) -> None:
        """Counts an attempt that ended with an outcome."""
        self.num_attempts += 1

    def failed(self, fault: Fault) -> None:
        """Counts an attempt that ended in a fault.

        Raises:
            RunFault: the budget is spent; its cause is `fault`.
        """
        self.num_attempts += 1
        self.num_faults += 1
        if self.num_attempts >= self._min_attempts and self.num_faults > self._max_fraction * self.num_attempts:
            raise RunFault(
                f"{self.num_faults} of {self.num_attempts} attempts ended in a fault of ours; "
                f"the last one: {type(fault).__name__}: {fault}"
            ) from fault


class DropBudget:
    """Decides when a run that only drops groups must stop.

    Args:
        max_in_a_row: dropped groups without a complete one between them.
    """

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0

    def add(self, group: Group | DroppedGroup) -> None:
        """Counts a group that has left.

        Raises:
            RunFault: the budget is spent; says why the last one was dropped.
        """
        if isinstance(group, Group):
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row >= self._max_in_a_row:
            raise RunFault(
                f"{self._in_a_row} groups in a row were dropped (engine.max_dropped_in_a_row); "
                f"the last one, of task {group.task_id}: {group.reason}"
            )


@dataclass
class Parts:
    """Everything an episode works with."""

    sampler: Sampler
    renderer: Renderer
    environment: Environment
    judge: Judge
    config: EngineConfig
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    slots: anyio.CapacityLimiter = field(init=False)
    """One token per live episode."""

    def __post_init__(self) -> None:
        self.slots = anyio.CapacityLimiter(self.config.max_episodes)
