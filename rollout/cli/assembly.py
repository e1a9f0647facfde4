"""Puts an engine together from command-line flags; shared by `rollout eval` and `rollout run`.

Owns the meaning of the flags that both commands have (declared in `flags.py`). Invariant: every mistake in them is a
`ConfigError` before anything has started; leaving `open_engine` leaves nothing running.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from rollout.engine.config import EngineConfig
from rollout.engine.engine import RolloutEngine
from rollout.environment.code import CodeEnvironment, CodeEnvironmentConfig
from rollout.errors import ConfigError
from rollout.journal.writer import Journal
from rollout.rendering.bytes import BytesRenderer
from rollout.rendering.types import Renderer
from rollout.rendering.words import WordsRenderer
from rollout.sampler.config import SamplerConfig
from rollout.sampler.recorded import RecordedScript
from rollout.sampler.scripted import NOOP_PROGRAM, RolesScript, Script, ScriptedSampler
from rollout.sampler.types import Sampler
from rollout.sampler.vllm import VllmSampler
from rollout.tasks.demo import DemoFamily
from rollout.tasks.load import load_with_report
from rollout.tasks.types import Task
from rollout.verify.config import VerifierConfig
from rollout.verify.verifier import Verifier
from sandbox.host import SandboxConfig, SandboxHost

_RECORDED = "recorded:"
_SCRIPTED_TOKENS = 1 << 20
"""A scripted policy has no context window; its budgets only guard against accidents."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the flags ask for, checked."""

    tasks: tuple[Task, ...]
    renderer: Renderer
    engine: EngineConfig
    environment: CodeEnvironmentConfig
    verifier: VerifierConfig
    server: SamplerConfig | None
    script: Script | None


def read_setup(arguments: argparse.Namespace, *, group_size: int, temperature: float) -> Setup:
    """Loads the tasks and checks every flag.

    Raises:
        ConfigError: a flag, the task set or the model folder cannot be used.
    """
    tasks = _select(arguments)
    renderer = _renderer(arguments, tasks)
    script = _script(arguments.sampler, renderer) if arguments.sampler is not None else None
    if script is not None:
        tasks = _covered(tasks, script)
    scripted = script is not None
    return Setup(
        tasks=tuple(tasks),
        renderer=renderer,
        engine=EngineConfig(
            group_size=group_size,
            temperature=temperature,
            max_tokens=arguments.max_tokens or (_SCRIPTED_TOKENS if scripted else 512),
            max_context_tokens=arguments.max_context or (4 * _SCRIPTED_TOKENS if scripted else 8_192),
            max_episodes=_at_least_one("--episodes", arguments.episodes) or (512 if scripted else 64),
            request_timeout_s=arguments.request_timeout,
            seed=arguments.seed,
        ),
        environment=CodeEnvironmentConfig(max_turns=arguments.max_turns),
        verifier=VerifierConfig(concurrency=_at_least_one("--jobs", arguments.jobs) or 2 * (os.cpu_count() or 1)),
        server=SamplerConfig(server=arguments.server, assume_version=0) if arguments.server is not None else None,
        script=script,
    )


@asynccontextmanager
async def open_engine(setup: Setup, *, run_dir: Path | None, command: str) -> AsyncIterator[RolloutEngine]:
    """A running engine.

    Args:
        setup: see `read_setup`.
        run_dir: where to journal; None for nowhere.
        command: recorded in the journal's header.

    Raises:
        Fault: the policy server does not answer, or the journal cannot be opened.
    """
    async with AsyncExitStack() as stack:
        journal = None
        if run_dir is not None:
            config_json = msgspec.json.encode({"engine": setup.engine, "environment": setup.environment}).decode()
            journal = await stack.enter_async_context(Journal.open(run_dir, command=command, config_json=config_json))
        sampler = await _open_sampler(setup, stack)
        host = await stack.enter_async_context(SandboxHost.start(SandboxConfig()))
        verifier = await stack.enter_async_context(Verifier(host, setup.verifier))
        yield await stack.enter_async_context(
            RolloutEngine(
                sampler=sampler,
                renderer=setup.renderer,
                environment=CodeEnvironment(verifier, setup.environment),
                verifier=verifier,
                config=setup.engine,
                journal=journal,
            )
        )


async def _open_sampler(setup: Setup, stack: AsyncExitStack) -> Sampler:
    if setup.server is None:
        assert setup.script is not None
        return ScriptedSampler(setup.script, setup.renderer)
    server = await stack.enter_async_context(VllmSampler(setup.server, vocab_size=setup.renderer.vocab_size))
    await server.wait_ready(10.0)
    return server


def _select(arguments: argparse.Namespace) -> list[Task]:
    loaded = load_with_report(arguments.tasks, skip_unsupported=arguments.skip_unsupported)
    for line in loaded.skipped:
        print(f"skipped {line}", file=sys.stderr)
    tasks = loaded.tasks
    if arguments.task_ids is not None:
        wanted = arguments.task_ids.split(",")
        by_id = {task.id: task for task in tasks}
        missing = [task_id for task_id in wanted if task_id not in by_id]
        if missing:
            raise ConfigError("--task-ids", missing[0], f"no such task; the first one is {tasks[0].id}")
        tasks = [by_id[task_id] for task_id in wanted]
    return tasks[: _at_least_one("--limit", arguments.limit)]


def _renderer(arguments: argparse.Namespace, tasks: Sequence[Task]) -> Renderer:
    if arguments.model_dir is not None:
        from rollout.rendering.chat import ChatRenderer

        return ChatRenderer(arguments.model_dir, system=arguments.system)
    if all(task.metadata.get("family") == "demo" for task in tasks):
        return WordsRenderer(DemoFamily(0).vocabulary)
    if arguments.server is not None:
        raise ConfigError("--model-dir", None, "name the folder with the policy's tokenizer.json and chat template")
    return BytesRenderer()


def _script(text: str, renderer: Renderer) -> Script:
    text = text.removeprefix("scripted:")
    if text.startswith(_RECORDED):
        return RecordedScript.read(text.removeprefix(_RECORDED))
    noop = "" if isinstance(renderer, WordsRenderer) else NOOP_PROGRAM
    return RolesScript(text.split(","), renderer, noop=noop)  # type: ignore[arg-type]


def _covered(tasks: Sequence[Task], script: Script) -> list[Task]:
    """The tasks that the script can answer for; the others are named."""
    problems = {task.id: script.covers(task) for task in tasks}
    left_out = [f"{task_id}: {problem}" for task_id, problem in problems.items() if problem is not None]
    if len(left_out) == len(tasks):
        raise ConfigError("--sampler", left_out[0], "the script can answer for none of the tasks")
    if left_out:
        print(f"note: {len(left_out)} tasks are left out ({left_out[0]}, ...)", file=sys.stderr)
    return [task for task in tasks if problems[task.id] is None]


def _at_least_one(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(flag, value, "must be at least 1")
    return value
