"""The training loop over an open lane: frames in, weights and checkpoints out.

Owns the order of things. Invariant: Hello first; weights are broadcast before the first frame is awaited;
after every RL step and after the last SFT step the new weights are in use before the step is reported done;
a checkpoint holds exactly the steps that it names. A failure is told to the engine in one `LearnerError`
message, while it still listens, and ends the run.
"""

from __future__ import annotations

import socket
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import nn

from learner import checkpoint
from learner.errors import TrainingError
from learner.publish import Publisher
from learner.reader import StepBatch, read_step
from learner.trainer import Trainer
from rollout.config.learner import LearnerConfig, ModelConfig
from rollout.errors import ConfigError, RolloutError
from rollout.lane.control import (
    MAX_TEXT,
    CheckpointSaved,
    Finish,
    Hello,
    LearnerError,
    Published,
    PublishNow,
    StepDone,
)
from rollout.lane.errors import PeerGone
from rollout.lane.ring import LaneReader

_IDLE_S = 60.0
_OPEN_S = 600.0
"""For the engine to open the lane; it first waits for its policy server."""


class Learner:
    """One run of the training loop over an open lane."""

    def __init__(
        self, config: LearnerConfig, trainer: Trainer, publisher: Publisher, reader: LaneReader, run_dir: Path
    ) -> None:
        self._config = config
        self._trainer = trainer
        self._publisher = publisher
        self._reader = reader
        self._folder = run_dir / "checkpoints"

    def run(self) -> None:
        """Trains until the engine says Finish; errors as the parts it is made of."""
        progress = self._trainer.progress
        progress.weight_version = self._publisher.version
        self._reader.send(
            Hello(
                phase_steps_sft=progress.sft_steps,
                step=progress.step,
                next_delivery_seq=progress.next_delivery_seq,
                weight_version=progress.weight_version,
            )
        )
        self._publish()
        waiting_since = time.monotonic()
        while True:
            try:
                message = self._reader.wait(_IDLE_S)
            except TimeoutError:
                continue  # a long evaluation; the engine's death would have been PeerGone
            if isinstance(message, Finish):
                self._save()
                return
            if isinstance(message, PublishNow):
                self._publish()
                continue
            self._step(waiting_since)
            waiting_since = time.monotonic()

    def _step(self, waiting_since: float) -> None:
        batch = read_step(self._reader)
        wait_s = time.monotonic() - waiting_since
        if batch.kind == "sft":
            self._sft(batch, wait_s)
        else:
            self._rl(batch, wait_s)

    def _sft(self, batch: StepBatch, wait_s: float) -> None:
        progress, config = self._trainer.progress, self._config
        _in_order(batch, progress.sft_steps)
        metrics = self._trainer.sft_step(batch)
        last = progress.sft_steps == config.sft.steps
        publish_s = self._publish() if last else 0.0
        self._done(batch, metrics, wait_s, publish_s)
        if last or progress.sft_steps % config.checkpoint_every_sft == 0:
            self._save()

    def _rl(self, batch: StepBatch, wait_s: float) -> None:
        progress, config = self._trainer.progress, self._config
        _in_order(batch, progress.step)
        metrics = self._trainer.rl_step(batch)
        publish_s = self._publish()
        self._done(batch, metrics, wait_s, publish_s)
        if progress.step % config.checkpoint_every == 0:
            self._save()

    def _done(self, batch: StepBatch, metrics: dict[str, float], wait_s: float, publish_s: float) -> None:
        seconds = {"wait_s": wait_s, "publish_s": publish_s}
        self._reader.send(StepDone(step=batch.step, kind=batch.kind, metrics=metrics | seconds))

    def _publish(self) -> float:
        seconds = self._publisher.publish()
        progress = self._trainer.progress
        progress.weight_version = self._publisher.version
        self._reader.send(Published(weight_version=progress.weight_version, step=progress.step))
        return seconds

    def _save(self) -> None:
        progress = self._trainer.progress
        path = checkpoint.save(self._folder, progress, self._trainer.state(), keep=self._config.keep)
        self._reader.send(CheckpointSaved(step=progress.step, path=str(path)))


def _in_order(batch: StepBatch, due: int) -> None:
    if batch.step != due:
        raise TrainingError(f"{batch.kind} step {batch.step} came out of order: step {due} was due")


def run(
    config: LearnerConfig,
    *,
    lane: socket.socket,
    weights: socket.socket | None,
    run_dir: Path,
    resume: bool = False,
    model: nn.Module | None = None,
) -> None:
    """Trains one model over a lane, until the engine says so.

    Args:
        config: resolved; a built-in model has its vocabulary size.
        lane: the learner's end of the lane's socket pair.
        weights: the learner's end of the policy server's socket pair; None publishes to nobody.
        run_dir: holds `checkpoints/` and the version counter.
        resume: continue from the newest valid checkpoint, if there is one.
        model: trained instead of the one that the config names.

    Raises:
        RolloutError: training cannot go on; the engine has been told, if it still listens.
    """
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    with LaneReader(lane, timeout_s=_OPEN_S) as reader:
        try:
            trainer = Trainer(model or build_model(config.model), config, pick_device(config.device))
            saved = checkpoint.load_newest(run_dir / "checkpoints") if resume else None
            if saved is not None:
                trainer.restore(*saved)
            publisher = Publisher(
                weights,
                trainer.model,
                run_dir,
                newest_version=trainer.progress.weight_version,
                timeout_s=config.publish_timeout_s,
            )
            try:
                Learner(config, trainer, publisher, reader, run_dir).run()
            finally:
                publisher.close()
        except Exception as error:  # the boundary of the process: the engine hears why, then it ends
            _report(reader, error)
            raise


def build_model(config: ModelConfig) -> nn.Module:
    """The model of a run, on the CPU in float32.

    Raises:
        ConfigError: the folder cannot be used, or the sizes contradict each other.
    """
    from learner.hf import load_decoder
    from learner.model import Decoder, DecoderConfig

    if config.path is not None:
        return load_decoder(Path(config.path), max_len=config.max_len)
    sizes = {name: getattr(config, name) for name in ("vocab_size", "eos_token_id", "dim", "layers", "heads")}
    try:
        return Decoder(DecoderConfig(**sizes, kv_heads=config.kv_heads, max_len=config.max_len), seed=config.seed)
    except ValueError as error:
        raise ConfigError("learner.model", sizes, str(error)) from error


def pick_device(name: str) -> torch.device:
    """`auto` is cuda where there is one.

    Raises:
        ConfigError: cuda is asked for and absent.
    """
    present = torch.cuda.is_available()
    if name == "cuda" and not present:
        raise ConfigError("learner.device", name, "torch finds no CUDA device; write `auto` or `cpu`")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and present) else "cpu")


def _report(reader: LaneReader, error: Exception) -> None:
    if isinstance(error, PeerGone):
        return
    ours = isinstance(error, RolloutError)
    text = f"{type(error).__name__}: {error}" if ours else traceback.format_exc()
    try:
        reader.send(LearnerError(message=text[-MAX_TEXT:]), timeout_s=2)
    except RolloutError as unsent:
        print(f"learner: the engine could not be told: {unsent}", file=sys.stderr)
