"""`RolloutEngine`: wiring, and nothing else.

Owns the task group in which runs live. Invariant: leaving the engine ends every episode, request
and verdict that it started.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

import anyio
import anyio.abc

from rollout.engine.config import EngineConfig
from rollout.engine.evaluate import EvalReport, EvalTally
from rollout.engine.metrics import EngineMetrics
from rollout.engine.parts import Judge, Parts
from rollout.engine.stream import GroupStream, RunOptions
from rollout.environment.types import Environment
from rollout.errors import RunFault
from rollout.journal.records import EvalRecord
from rollout.journal.writer import Journal
from rollout.rendering.types import Renderer
from rollout.sampler.types import Sampler
from rollout.tasks.types import Task
from rollout.types import DroppedGroup, Group


class RolloutEngine:
    """Runs groups of episodes.

    Args:
        sampler: asks the policy for actions.
        renderer: text to tokens and back; it must be the policy's own.
        environment: turns actions into observations.
        verifier: judges finished episodes.
        config: budgets and windows.
        journal: where finished groups are recorded before they are handed out; None for nowhere.
        first_group_id: ids count up from here; the journal's `next_group_id` on resume.

    Example:
        async with RolloutEngine(sampler=s, renderer=r, environment=e, verifier=v, config=c) as engine:
            async for group in engine.run(tasks):
                ...
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        renderer: Renderer,
        environment: Environment,
        verifier: Judge,
        config: EngineConfig | None = None,
        journal: Journal | None = None,
        first_group_id: int | None = None,
    ) -> None:
        self._parts = Parts(sampler, renderer, environment, verifier, config or EngineConfig())
        self._journal = journal
        if first_group_id is None:
            first_group_id = journal.next_group_id if journal is not None else 0
        self._next_group_id = first_group_id
        self._tasks: anyio.abc.TaskGroup | None = None
        self.weight_version = 0
        """Version that the policy server samples with, as far as the engine was told; new groups
        salt their prefix cache with it."""

    @property
    def metrics(self) -> EngineMetrics:
        """Counters since the engine was made."""
        return self._parts.metrics

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self.metrics.watch_loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._tasks is not None
        tasks, self._tasks = self._tasks, None
        tasks.cancel_scope.cancel()
        # The task group only needs to see its own cancellation: an error of the caller's passes by unwrapped.
        own = error if isinstance(error, anyio.get_cancelled_exc_class()) else None
        try:
            swallow = await tasks.__aexit__(type(own) if own else None, own, trace if own else None)
        except BaseExceptionGroup as crash:
            if error is None or own is not None:
                raise _root_cause(crash) from None
            raise
        return swallow if own is not None else None

    def run(self, tasks: Iterable[Task] | AsyncIterable[Task], options: RunOptions | None = None) -> GroupStream:
        """Starts a run and returns its groups, each exactly once, as they finish.

        Args:
            tasks: drawn one by one, each when the window has a free slot; may be endless.
            options: what differs from the configuration.

        Raises (from the iteration):
            RunFault: faults passed the configured fraction (its cause is the last one), or too many
                groups in a row were dropped.
            JournalFault: the run directory cannot be written.
        """
        assert self._tasks is not None, "use the engine as an async context manager"
        stream = GroupStream(
            self._parts,
            tasks,
            options or RunOptions(),
            new_group_id=self._new_group_id,
            weight_version=lambda: self.weight_version,
            journal=self._journal,
        )
        self._tasks.start_soon(stream.drive)
        return stream

    async def evaluate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        temperature: float | None = None,
        *,
        name: str = "eval",
        progress: Callable[[Group | DroppedGroup], None] | None = None,
    ) -> EvalReport:
        """Runs `num_samples` episodes of every task and reports the rates; journaled.

        Args:
            tasks: with distinct ids.
            num_samples: episodes of each.
            temperature: None for the engine's own.
            name: of the report.
            progress: called with each group as it finishes; must not block.

        Raises:
            RunFault: every group was dropped, so there is nothing to report; or as `run`.

        Cancellation ends its episodes.
        """
        started = anyio.current_time()
        tally = EvalTally(tasks, num_samples)
        window = max(1, -(-self._parts.config.max_episodes // num_samples))
        options = RunOptions(
            group_size=num_samples, temperature=temperature, purpose="eval", window_groups=min(window, 1_024)
        )
        stream = self.run(tasks, options)
        try:
            async for group in stream:
                tally.add(group)
                if progress is not None:
                    progress(group)
        finally:
            stream.stop("the evaluation was cancelled")
        if tasks and not tally.num_samples:
            raise RunFault(f"the evaluation {name} has no sample with a reward: {tally.main_cause()}")
        report = tally.report(
            name=name,
            temperature=self._parts.config.temperature if temperature is None else temperature,
            weight_version=self.weight_version,
            wall_s=anyio.current_time() - started,
        )
        if self._journal is not None:
            self._journal.append(EvalRecord(report=report))
            await self._journal.flush()
        return report

    def _new_group_id(self) -> int:
        group_id = self._next_group_id
        self._next_group_id += 1
        return group_id


def _root_cause(crash: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception inside, when all that are inside are of one type (siblings meet the same bug)."""
    leaves = _leaves(crash)
    return leaves[0] if len({type(leaf) for leaf in leaves}) == 1 else crash


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
