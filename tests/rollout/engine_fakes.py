"""Stand-ins for sandboxes and verdicts, where the engine's own logic is what a test is about."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from rollout.engine.config import EngineConfig
from rollout.engine.engine import RolloutEngine
from rollout.environment.types import LiveEnvironment, Reaction
from rollout.errors import Fault
from rollout.rendering.bytes import BytesRenderer
from rollout.sampler.scripted import RolesScript, ScriptedSampler
from rollout.sampler.types import Sampler
from rollout.tasks.types import Case, CaseTests, Task, TaskLimits
from rollout.types import Invalid, LayerVerdict, Reward, TestResult, Verdict

RENDERER = BytesRenderer()


def make_task(name: str = "a", *, max_turns: int = 1, difficulty: str = "", episode_timeout_s: float = 60.0) -> Task:
    return Task(
        id=f"fake/{name}",
        prompt=f"Write the program {name}.",
        visible_tests=CaseTests(cases=(Case(args="[1]", expected="1"),)),
        hidden_tests=CaseTests(cases=(Case(args="[2]", expected="2"),)),
        oracle="right",
        known_wrong=("bug",),
        limits=TaskLimits(max_turns=max_turns, episode_timeout_s=episode_timeout_s),
        difficulty=difficulty,
    )


def layer(name: str, passed: bool, detail: str = "") -> LayerVerdict:
    test = TestResult(name="test 1", passed=passed, detail=detail)
    return LayerVerdict(
        layer=name, passed=passed, score=float(passed), num_tests=1, num_passed=int(passed), tests=(test,)
    )


class FakeVerifier:
    """Passes submissions that contain `right`; `fault` may raise, or return an Invalid's reason."""

    def __init__(self, fault: Callable[[Task, int], str | None] | None = None) -> None:
        self.num_verdicts = 0
        self.num_visible = 0
        self.fault = fault

    async def verify(self, task: Task, submission: str | None) -> Verdict:
        number = self.num_verdicts
        self.num_verdicts += 1
        await anyio.lowlevel.checkpoint()
        reason = self.fault(task, number) if self.fault is not None else None
        if reason is not None:
            return Verdict(task_id=task.id, reward=Invalid(reason))
        passed = submission is not None and "right" in submission
        layers = (layer("visible", passed), layer("hidden", passed))
        return Verdict(task_id=task.id, reward=Reward(float(passed)), layers=layers)

    async def run_visible(self, task: Task, submission: str) -> LayerVerdict:
        self.num_visible += 1
        await anyio.lowlevel.checkpoint()
        return layer("visible", "right" in submission, f"ValueError: {submission.strip()} is not the answer")


class FakeEnvironment:
    """Asks for another action until one contains `right`; counts what is open."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.num_open = 0
        self.delay_s = delay_s

    def max_turns(self, task: Task) -> int:
        return task.limits.max_turns

    @asynccontextmanager
    async def open(self, task: Task) -> AsyncIterator[LiveEnvironment]:
        self.num_open += 1
        try:
            yield self
        finally:
            self.num_open -= 1

    async def act(self, action: str, *, last: bool) -> Reaction:
        if self.delay_s:
            await anyio.sleep(self.delay_s)
        if last or "right" in action:
            return Reaction(done=True, submission=action, visible=layer("visible", "right" in action))
        if "malformed" in action:
            return Reaction(done=False, observation="no program")
        return Reaction(done=False, observation="it failed", submission=action, visible=layer("visible", False))


class FaultySampler:
    """Raises what `fault(number of the request)` returns; otherwise passes on."""

    def __init__(self, inner: Sampler, fault: Callable[[int], Fault | None]) -> None:
        self.inner = inner
        self.fault = fault
        self.num_requests = 0

    async def sample(self, request):  # type: ignore[no-untyped-def]
        number = self.num_requests
        self.num_requests += 1
        error = self.fault(number)
        if error is not None:
            raise error
        return await self.inner.sample(request)


class HangingSampler:
    """Never answers; tells when a request has come and how many were cancelled."""

    def __init__(self) -> None:
        self.started = anyio.Event()
        self.num_cancelled = 0

    async def sample(self, request):  # type: ignore[no-untyped-def]
        self.started.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.num_cancelled += 1


def scripted(*roles: str) -> ScriptedSampler:
    return ScriptedSampler(RolesScript(roles, RENDERER), RENDERER)  # type: ignore[arg-type]


def make_engine(sampler: Sampler | None = None, **overrides: object) -> RolloutEngine:
    """An engine over fakes; `overrides` are constructor arguments or fields of `EngineConfig`."""
    parts = {
        name: overrides.pop(name)
        for name in ("environment", "verifier", "journal", "first_group_id", "renderer")
        if name in overrides
    }
    settings: dict[str, object] = {"group_size": 2, "groups_per_batch": 4, "retry_backoff_s": 0.001}
    return RolloutEngine(
        **{  # type: ignore[arg-type]
            "sampler": sampler or scripted("oracle"),
            "renderer": RENDERER,
            "environment": FakeEnvironment(),
            "verifier": FakeVerifier(),
            "config": EngineConfig(**{**settings, **overrides}),  # type: ignore[arg-type]
            **parts,
        }
    )


async def collect(engine: RolloutEngine, tasks: Sequence[Task], **options: object) -> list:  # type: ignore[type-arg]
    from rollout.engine.stream import RunOptions

    async with engine:
        return [group async for group in engine.run(tasks, RunOptions(**options))]  # type: ignore[arg-type]
