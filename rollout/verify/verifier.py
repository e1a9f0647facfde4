"""Judges finished submissions: every layer in fresh sandboxes, then the reward they make.

Owns the judge's sandbox, the bound on verdicts in progress and the retries. Invariants: what a submission
does is a verdict (a failed one, with its reason as evidence); a fault of ours is tried again and then becomes
`Invalid`, never a reward; nothing of a task's author or of a submission runs in this process.
"""

from __future__ import annotations

import time
from collections import deque
from types import ModuleType, TracebackType

import anyio
from anyio.abc import TaskGroup

from rollout.errors import ConfigError, Fault, VerifierFault
from rollout.tasks.program import program_of
from rollout.tasks.types import CaseTests, Task, Tests
from rollout.types import Invalid, LayerVerdict, Reward, TestResult, Verdict
from rollout.verify.candidate import Candidate, open_candidate
from rollout.verify.config import VerifierConfig
from rollout.verify.host import Host
from rollout.verify.judge import Judge
from rollout.verify.layers import hidden, visible
from rollout.verify.layers.cases import judge_cases
from rollout.verify.layers.code import judge_code
from rollout.verify.layers.result import all_failed, layer_verdict
from rollout.verify.reuse import VerdictCache, key_of

_LAYERS: dict[str, ModuleType] = {visible.NAME: visible, hidden.NAME: hidden}


class Verifier:
    """Judges submissions; use as `async with verifier:` on one event loop.

    Args:
        host: where fresh sandboxes come from.
        config: how verdicts are reached.
    """

    def __init__(self, host: Host, config: VerifierConfig | None = None) -> None:
        self._host = host
        self._config = config or VerifierConfig()
        self._slots = anyio.Semaphore(self._config.concurrency)
        self._cache = VerdictCache(self._config.reuse_capacity) if self._config.reuse_verdicts else None
        self._tasks: TaskGroup | None = None
        self._judge: Judge | None = None
        self.num_faults = 0
        """Faults met so far, retried ones included."""

    async def __aenter__(self) -> Verifier:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._judge = Judge(self._host, self._config, self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        self._judge = None
        # Not told of the body's own exception, which then leaves as it is and not inside a group.
        await self._tasks.__aexit__(None, None, None)

    async def verify(self, task: Task, submission: str | None) -> Verdict:
        """The verdict of `submission`; None (no program was found in the action) fails every test.

        Raises only for what is wrong from the start (`ConfigError` of a task without tests, `CapabilityError` of
        the sandbox layer). Cancelling it kills what it started.
        """
        names: list[str] = [name for name in self._config.layers if _LAYERS[name].tests_of(task) is not None]
        deciding = deciding_layer(task)
        names += [deciding] if deciding not in names else []
        if self._cache is None or submission is None:
            return await self._verdict(task, submission, names)
        return await self._cache.get(key_of(task, submission), lambda: self._verdict(task, submission, names))

    async def run_visible(self, task: Task, submission: str | None) -> LayerVerdict:
        """The visible layer alone, for turns within an episode; its texts may be shown to the policy.

        Raises `Fault` when no verdict could be had after the configured retries, and `ConfigError` for a task
        without visible tests.
        """
        if task.visible_tests is None:
            raise ConfigError(f"task {task.id}.visible_tests", None, "this task has no tests that a policy may see")
        (layer,) = await self._retried(task, submission, [visible.NAME])
        return layer

    async def _verdict(self, task: Task, submission: str | None, names: list[str]) -> Verdict:
        try:
            layers = await self._retried(task, submission, names)
        except Fault as fault:
            return Verdict(task_id=task.id, reward=Invalid(f"{type(fault).__name__}: {fault}"[:500]))
        verdict = Verdict(task_id=task.id, reward=Reward(0.0), layers=tuple(layers))
        decided = verdict.layer(deciding_layer(task))
        assert decided is not None
        value = decided.score if self._config.reward_rule == "fraction" else float(decided.passed)
        return Verdict(task_id=task.id, reward=Reward(value), layers=tuple(layers))

    async def _retried(self, task: Task, submission: str | None, names: list[str]) -> list[LayerVerdict]:
        failure = self._refused(submission)
        if failure or submission is None:
            return [self._failed(task, name, failure) for name in names]
        for attempt in range(self._config.retries + 1):
            try:
                async with self._slots:
                    return await self._judged(
                        task, program_of(task, submission), names, last_try=attempt == self._config.retries
                    )
            except Fault:
                self.num_faults += 1
                if attempt == self._config.retries:
                    raise
        raise AssertionError("unreachable")

    def _refused(self, submission: str | None) -> str:
        """Why a submission fails without being run, or nothing."""
        if submission is None:
            return "no program was found in the answer"
        size = len(submission.encode("utf-8", "surrogatepass"))
        if size > self._config.max_submission_bytes:
            return f"the program is too long: {size} bytes, at most {self._config.max_submission_bytes} are run"
        return ""

    async def _judged(self, task: Task, program: str, names: list[str], last_try: bool) -> list[LayerVerdict]:
        """The layers in order. Sets of cases share a candidate; each set of test code gets a fresh one."""
        pending = deque(names)
        done: list[LayerVerdict] = []
        while pending:
            async with open_candidate(self._host, task, program, self._config, len(pending)) as candidate:
                if not candidate.loaded:
                    return done + [self._failed(task, name, candidate.failure) for name in pending]
                done.append(await self._layer(task, candidate, pending.popleft(), last_try))
                while pending and not candidate.failure and _shared(task, done[-1].layer) and _shared(task, pending[0]):
                    done.append(await self._layer(task, candidate, pending.popleft(), last_try))
        return done

    async def _layer(self, task: Task, candidate: Candidate, name: str, last_try: bool) -> LayerVerdict:
        started_s = time.monotonic()
        tests = _tests(task, name)
        results: list[TestResult]
        if isinstance(tests, CaseTests):
            results = await judge_cases(candidate, tests, task.entry_points[0])
        else:
            if self._judge is None:
                raise VerifierFault("the verifier is not open")
            results = await judge_code(candidate, tests, task, self._judge, self._config, last_try)
        wall_s = time.monotonic() - started_s
        return layer_verdict(name, _LAYERS[name].VERSION, results, wall_s=wall_s, failure=candidate.failure)

    @staticmethod
    def _failed(task: Task, name: str, failure: str) -> LayerVerdict:
        tests = _tests(task, name)
        num_tests = len(tests.cases) if isinstance(tests, CaseTests) else len(tests.snippets)
        return layer_verdict(name, _LAYERS[name].VERSION, all_failed(num_tests, failure), wall_s=0.0, failure=failure)


def deciding_layer(task: Task) -> str:
    """The layer that the reward comes from: hidden, or visible where a task has no hidden tests."""
    for layer in (hidden, visible):
        if layer.tests_of(task) is not None:
            return str(layer.NAME)
    raise ConfigError(f"task {task.id}.hidden_tests", None, "a task needs hidden or visible tests")


def _tests(task: Task, name: str) -> Tests:
    tests: Tests | None = _LAYERS[name].tests_of(task)
    assert tests is not None
    return tests


def _shared(task: Task, name: str) -> bool:
    return isinstance(_tests(task, name), CaseTests)
