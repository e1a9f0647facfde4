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

from rollout.cli.flags import at_least, named_by_flags
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
from sandbox.pool.pool import SandboxPool

_RECORDED = "recorded:"
_FLAGS = {
    "engine.group_size": "--group-size",
    "engine.temperature": "--temperature",
    "engine.max_tokens": "--max-tokens",
    "engine.max_context_tokens": "--max-context",
    "engine.max_episodes": "--episodes",
    "engine.request_timeout_s": "--request-timeout",
    "engine.seed": "--seed",
    "environment.max_turns": "--max-turns",
    "verify.concurrency": "--jobs",
    "sampler.server": "--server",
}
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
    """Checks every flag and loads the tasks; what is left out of them is told only when all is well.

    Raises:
        ConfigError: a flag, the task set or the model folder cannot be used.
    """
    scripted = arguments.sampler is not None
    for flag, low in (("limit", 1), ("jobs", 1), ("episodes", 1), ("max_tokens", 1), ("max_context", 2)):
        at_least("--" + flag.replace("_", "-"), getattr(arguments, flag), low)
    with named_by_flags(_FLAGS):
        engine = EngineConfig(
            group_size=group_size,
            temperature=temperature,
            max_tokens=arguments.max_tokens or (_SCRIPTED_TOKENS if scripted else 512),
            max_context_tokens=arguments.max_context or (4 * _SCRIPTED_TOKENS if scripted else 8_192),
            max_episodes=arguments.episodes or (512 if scripted else 64),
            request_timeout_s=arguments.request_timeout,
            seed=arguments.seed,
        )
        environment = CodeEnvironmentConfig(max_turns=arguments.max_turns)
        verifier = VerifierConfig(concurrency=arguments.jobs or 2 * (os.cpu_count() or 1))
        server = None if scripted else SamplerConfig(server=arguments.server, assume_version=0)
    loaded = load_with_report(arguments.tasks, skip_unsupported=arguments.skip_unsupported)
    tasks = _select(loaded.tasks, arguments)
    renderer = _renderer(arguments, tasks)
    script = None
    notes = [f"skipped {line}" for line in loaded.skipped]
    if scripted:
        script = _script(arguments.sampler, renderer)
        tasks, left_out = _covered(tasks, script)
        notes += left_out
    if arguments.run_dir is not None:
        _make_run_dir(arguments.run_dir)
    for line in notes:
        print(line, file=sys.stderr)
    return Setup(
        tasks=tuple(tasks),
        renderer=renderer,
        engine=engine,
        environment=environment,
        verifier=verifier,
        server=server,
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
        pool = await stack.enter_async_context(SandboxPool.start(host))
        verifier = await stack.enter_async_context(Verifier(pool, setup.verifier))
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


def _make_run_dir(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--run-dir", str(run_dir), f"cannot be a run directory ({error.strerror})") from None


def _select(tasks: list[Task], arguments: argparse.Namespace) -> list[Task]:
    if arguments.task_ids is not None:
        wanted = arguments.task_ids.split(",")
        by_id = {task.id: task for task in tasks}
        missing = [task_id for task_id in wanted if task_id not in by_id]
        if missing:
            raise ConfigError("--task-ids", missing[0], f"no such task; the first one is {tasks[0].id}")
        tasks = [by_id[task_id] for task_id in wanted]
    return tasks[: arguments.limit]


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
        with named_by_flags({"sampler.recorded": "--sampler"}):
            return RecordedScript.read(text.removeprefix(_RECORDED))
    noop = "" if isinstance(renderer, WordsRenderer) else NOOP_PROGRAM
    return RolesScript(text.split(","), renderer, noop=noop)  # type: ignore[arg-type]


def _covered(tasks: Sequence[Task], script: Script) -> tuple[list[Task], list[str]]:
    """The tasks that the script can answer for, and what to say of the others."""
    problems = {task.id: script.covers(task) for task in tasks}
    left_out = [f"{task_id}: {problem}" for task_id, problem in problems.items() if problem is not None]
    if len(left_out) == len(tasks):
        raise ConfigError("--sampler", left_out[0], "the script can answer for none of the tasks")
    notes = [f"note: {len(left_out)} tasks are left out ({left_out[0]}, ...)"] if left_out else []
    return [task for task in tasks if problems[task.id] is None], notes
