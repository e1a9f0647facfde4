"""One run: admits tasks into the window, runs their groups, hands each one out exactly once.

Owns the groups in flight. Invariant: every admitted group leaves exactly once, as a `Group` or a
`DroppedGroup`, in the order of finishing; no more than the window's capacity wait to be taken, so
the consumer's pace bounds memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Literal

import anyio
import msgspec

from rollout.engine.group import GroupJob, run_group
from rollout.engine.parts import DropBudget, FaultBudget, Parts
from rollout.engine.window import Window
from rollout.errors import Fault
from rollout.journal.records import DroppedRecord, GroupRecord
from rollout.journal.writer import Journal
from rollout.tasks.types import Task
from rollout.types import DroppedGroup, Group


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one run differs from the engine's configuration."""

    group_size: int | None = None
    temperature: float | None = None
    purpose: Literal["train", "eval"] = "train"
    """Recorded in the journal. Request seeds of `eval` depend on the task, not on the group, so
    that evaluations before and after training draw alike."""
    window_groups: int | None = None
    hold: bool = False
    """Slots stay taken until `GroupStream.release`, so that admission waits for the consumer's
    optimizer step; otherwise a slot is free as soon as its group is taken."""


class GroupStream(AsyncIterator[Group | DroppedGroup]):
    """The groups of one run; made by `RolloutEngine.run`. One consumer.

    Iteration raises the root-cause `Fault` after everything that had been admitted was handed out.
    """

    def __init__(
        self,
        parts: Parts,
        tasks: Iterable[Task] | AsyncIterable[Task],
        options: RunOptions,
        *,
        new_group_id: Callable[[], int],
        weight_version: Callable[[], int],
        journal: Journal | None,
    ) -> None:
        config = parts.config
        self._parts = parts
        self._tasks = tasks
        self._options = options
        self._new_group_id = new_group_id
        self._weight_version = weight_version
        self._journal = journal
        self._window = Window(options.window_groups or config.window_groups)
        self._budget = FaultBudget(config.max_fault_fraction, config.min_fault_attempts)
        # An evaluation is finite, and its report counts what was lost: only endless runs need the end.
        self._drops = DropBudget(config.max_dropped_in_a_row) if options.purpose == "train" else None
        self._in_flight: dict[int, Task] = {}
        self._ready: deque[Group | DroppedGroup] = deque()
        self._scope = anyio.CancelScope()
        self._changed = anyio.Event()
        self._slot_freed = anyio.Event()
        self._finished = False
        self._error: Fault | None = None
        self._stop_reason = "the engine was closed"

    def __aiter__(self) -> GroupStream:
        return self

    async def __anext__(self) -> Group | DroppedGroup:
        while not self._ready:
            if self._finished:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            await self._changed.wait()
        item = self._ready.popleft()
        if isinstance(item, DroppedGroup) or not self._options.hold:
            self.release(1)
        return item

    @property
    def num_outstanding(self) -> int:
        """Groups that hold a slot of the window."""
        return self._window.num_outstanding

    def release(self, num_groups: int) -> None:
        """Frees the slots of groups that were consumed (only with `RunOptions.hold`)."""
        self._window.release(num_groups)
        self._slot_freed.set()
        self._slot_freed = anyio.Event()

    def stop(self, reason: str = "the run was stopped") -> None:
        """Ends the run: groups in flight are cancelled and leave as dropped."""
        self._stop_reason = reason
        self._scope.cancel()

    async def drive(self) -> None:
        """Runs everything; the engine calls it, once, in its own task group."""
        try:
            with self._scope:
                async with anyio.create_task_group() as groups:
                    await self._admit(groups)
        except* Fault as failures:
            self._error = _first_fault(failures)
            self._stop_reason = f"the run stopped: {self._error}"
        finally:
            self._drop_in_flight()
            self._finished = True
            self._notify()

    async def _admit(self, groups: anyio.abc.TaskGroup) -> None:
        if isinstance(self._tasks, AsyncIterable):
            source = aiter(self._tasks)
            while await self._slot():
                task = await anext(source, None)
                if task is None:
                    return
                self._start(groups, task)
        else:
            iterator = iter(self._tasks)
            while await self._slot():
                task = next(iterator, None)
                if task is None:
                    return
                self._start(groups, task)

    async def _slot(self) -> bool:
        """Waits until the window has room; a task is drawn only then, as late as possible."""
        while self._window.num_outstanding >= self._window.capacity:
            await self._slot_freed.wait()
        return True

    def _start(self, groups: anyio.abc.TaskGroup, task: Task) -> None:
        admitted = self._window.admit()
        assert admitted, "a task was drawn without a free slot"
        options, config = self._options, self._parts.config
        group_id = self._new_group_id()
        job = GroupJob(
            group_id=group_id,
            task=task,
            group_size=options.group_size or config.group_size,
            temperature=config.temperature if options.temperature is None else options.temperature,
            seed_key=f"task {task.id}" if options.purpose == "eval" else f"group {group_id}",
            cache_salt=f"v{self._weight_version()}",
        )
        self._in_flight[group_id] = task
        self._parts.metrics.groups_admitted += 1
        groups.start_soon(self._run_one, job)

    async def _run_one(self, job: GroupJob) -> None:
        result = await run_group(self._parts, job, self._budget)
        with anyio.CancelScope(shield=True):
            # A finished group is neither lost nor reported as dropped when the run is stopped now.
            if self._journal is not None:
                self._journal.append(_record(result, self._options.purpose))
                await self._journal.flush()
            self._leave(result)
        if self._drops is not None:
            self._drops.add(result)

    def _leave(self, result: Group | DroppedGroup) -> None:
        del self._in_flight[result.group_id]
        if isinstance(result, Group):
            self._parts.metrics.groups_emitted += 1
        else:
            self._parts.metrics.groups_dropped += 1
        self._ready.append(result)
        self._notify()

    def _drop_in_flight(self) -> None:
        for group_id, task in list(self._in_flight.items()):
            self._leave(DroppedGroup(group_id=group_id, task_id=task.id, reason=self._stop_reason))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _record(result: Group | DroppedGroup, purpose: Literal["train", "eval"]) -> GroupRecord | DroppedRecord:
    if isinstance(result, Group):
        return GroupRecord(group=result, purpose=purpose)
    return DroppedRecord(dropped=result, purpose=purpose)


def _first_fault(failures: BaseExceptionGroup[Fault]) -> Fault:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Fault)
    return error
