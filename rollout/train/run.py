"""One training run from start to end: wiring of processes, engine, journal and phases.

Invariant: leaving `train`, in whatever way, leaves no process, sandbox or shared memory behind; a
death of the policy server or the learner ends the run with its cause, and `resume` goes on.
"""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from rollout.engine.engine import RolloutEngine
from rollout.environment.code import CodeEnvironment
from rollout.journal.records import StepRecord, WeightRecord
from rollout.journal.writer import Journal
from rollout.lane.control import LearnerMessage, Published, StepDone
from rollout.sampler.config import SamplerConfig
from rollout.sampler.vllm import VllmSampler
from rollout.train.config import TrainConfig
from rollout.train.history import AFTER, BEFORE, load_history
from rollout.train.link import LearnerLink
from rollout.train.phases import RunParts, evaluate, run_rl, run_sft
from rollout.train.progress import RunProgress
from rollout.train.report import TrainReport, make_report
from rollout.train.source import check_prompts, make_source
from rollout.train.workers import Workers, root_cause, start_workers
from rollout.verify.verifier import Verifier
from sandbox.host import SandboxHost
from sandbox.pool.pool import SandboxPool

FINISH_TIMEOUT_S = 120.0


async def train(config: TrainConfig, run_dir: Path, *, resume: bool, progress: RunProgress) -> TrainReport:
    """Runs or resumes the run in `run_dir`.

    Raises:
        ConfigError: a setting cannot be used; nothing has started.
        Fault: something of ours failed for good; `resume=True` continues from the last checkpoint.

    Cancellation ends every process and sandbox before it returns.
    """
    model_path = config.learner.model.path
    source, renderer = make_source(config.tasks, Path(model_path) if model_path else None)
    check_prompts(source, renderer, config.engine)
    if model_path is None:
        model = msgspec.structs.replace(
            config.learner.model, vocab_size=renderer.vocab_size, eos_token_id=renderer.stop_token_ids[0]
        )
        config = msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, model=model))
    started = time.monotonic()
    try:
        async with (
            Journal.open(run_dir, command="train", config_json=msgspec.json.encode(config).decode()) as journal,
            SandboxHost.start(config.sandbox) as host,
            SandboxPool.start(host, config.pool) as pool,
            Verifier(pool, config.verify) as verifier,
            start_workers(run_dir, config.learner, config.server, resume=resume) as workers,
            VllmSampler(
                SamplerConfig(server=workers.server_address, max_connections=config.server.max_batch),
                vocab_size=renderer.vocab_size,
            ) as sampler,
            RolloutEngine(
                sampler=sampler,
                renderer=renderer,
                environment=CodeEnvironment(verifier),
                verifier=verifier,
                config=config.engine,
                journal=journal,
            ) as engine,
            anyio.create_task_group() as watchers,
        ):
            observer = _Observer(journal, engine, config, progress)
            link = LearnerLink(workers.writer, observer)
            for watch in (workers.server.watch, workers.learner.watch, link.pump):
                watchers.start_soon(watch)
            await link.wait_until(
                lambda: link.hello is not None and link.weight_version >= 0,
                "the first weights",
                config.server.ready_timeout_s,
            )
            hello = link.hello
            assert hello is not None
            history = await anyio.to_thread.run_sync(
                lambda: load_history(
                    run_dir,
                    steps_done=hello.step,
                    next_delivery_seq=hello.next_delivery_seq,
                    groups_per_batch=config.engine.groups_per_batch,
                )
            )
            observer.rewards = history.rewards
            parts = RunParts(
                config=config,
                engine=engine,
                journal=journal,
                link=link,
                source=source,
                history=history,
                progress=progress,
            )
            await run_sft(parts)
            before = await evaluate(parts, BEFORE)
            await run_rl(parts)
            after = await evaluate(parts, AFTER)
            await _finish(workers, link)
            watchers.cancel_scope.cancel()
    except BaseExceptionGroup as failures:
        raise root_cause(failures) from failures
    return make_report(
        run_dir,
        before=before,
        after=after,
        history=history,
        steps=observer.steps,
        sft_steps=link.sft_steps_done,
        rl_steps=link.steps_done,
        unenforced=host.unenforced,
        wall_s=time.monotonic() - started,
    )


async def _finish(workers: Workers, link: LearnerLink) -> None:
    workers.learner.expect_end()
    await link.finish(FINISH_TIMEOUT_S)


class _Observer:
    """Notes what the learner says: in the journal, for the engine, and on the screen."""

    def __init__(self, journal: Journal, engine: RolloutEngine, config: TrainConfig, progress: RunProgress) -> None:
        self._journal = journal
        self._engine = engine
        self._config = config
        self._progress = progress
        self.rewards: list[float] = []
        self.steps: list[StepRecord] = []

    def __call__(self, message: LearnerMessage) -> None:
        match message:
            case StepDone():
                record = StepRecord(step=message.step, kind=message.kind, metrics=message.metrics)
                self.steps.append(record)
                self._journal.append(record)
                self._show(message)
            case Published():
                self._engine.weight_version = message.weight_version
                self._journal.append(
                    WeightRecord(weight_version=message.weight_version, step=message.step, unix_s=time.time())
                )
            case _:
                pass

    def _show(self, message: StepDone) -> None:
        values = {"loss": message.metrics.get("loss", 0.0)}
        if message.kind == "rl" and message.step < len(self.rewards):
            values = {"reward": self.rewards[message.step], **values}
        self._progress.advance(message.step + 1, values)
