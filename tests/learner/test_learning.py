"""The learner as a process: it learns, publishes, saves, resumes, and dies when it should."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import torch
from learner_process import LearnerProcess, learner_process
from step_helpers import group

from learner.errors import TrainingError
from learner.flat import read_flat
from learner.loop import build_model, run
from learner.model import Decoder
from learner.watchdog import EXIT_ORPHANED
from rollout.config.learner import LearnerConfig, ModelConfig, RlConfig, SftConfig
from rollout.errors import LearnerFault
from rollout.lane.control import CheckpointSaved, Finish, Hello, LearnerError, Published, PublishNow, StepDone
from rollout.lane.packing import SftExample, rl_frames, sft_frames
from rollout.lane.ring import LaneWriter

pytestmark = pytest.mark.anyio

SFT_STEPS = 12
CONFIG = LearnerConfig(
    model=ModelConfig(vocab_size=20, dim=32, layers=2, heads=2, max_len=32),
    sft=SftConfig(steps=SFT_STEPS, lr=3e-3),
    rl=RlConfig(steps=4, lr=3e-3),
    threads=1,
    device="cpu",
    checkpoint_every=100,
)
PROMPT = [1, 2]
GOOD, BAD = [1, 2, 3, 4, 0], [1, 2, 5, 6, 0]


def sequence_logprob(model: Decoder, tokens: list[int]) -> float:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        table = model.logits(model(ids)).log_softmax(-1)[0]
    return float(sum(table[i - 1, tokens[i]] for i in range(len(PROMPT), len(tokens))))


def model_of(weights: bytes) -> Decoder:
    model = build_model(CONFIG.model)
    read_flat(model, memoryview(weights))
    assert isinstance(model, Decoder)
    return model


def wait_until_read(writer: LaneWriter) -> None:
    """Shared memory has no event to wait for."""
    deadline = time.monotonic() + 10
    while writer.num_unread:
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def supervise(learner: LearnerProcess) -> list[float]:
    losses = []
    examples = [SftExample(token_ids=one, loss_mask=[False, False, True, True, True]) for one in (GOOD, BAD)]
    for step in range(SFT_STEPS):
        for frame in sft_frames(examples, step=step, max_tokens=5):
            await learner.writer.write(frame)
        done = await learner.expect(StepDone)
        assert (done.kind, done.step) == ("sft", step)
        losses.append(done.metrics["loss"])
    return losses


async def reinforce(learner: LearnerProcess, step: int) -> StepDone:
    model = model_of(learner.published[-1][1])
    sequences = [(GOOD, 2), (BAD, 2)] * 4
    logprob = sequence_logprob(model, GOOD) / 3
    made = group(step, sequences, [1.0, 0.0] * 4, [0.5, -0.5] * 4, logprob=logprob)
    for frame in rl_frames([made], step=step):
        await learner.writer.write(frame)
    return await learner.expect(StepDone)


async def test_it_learns_from_demonstrations_and_rewards_and_resumes_where_it_stopped(tmp_path: Path) -> None:
    async with learner_process(CONFIG, tmp_path) as learner:
        hello = await learner.expect(Hello)
        assert hello == Hello(phase_steps_sft=0, step=0, next_delivery_seq=0, weight_version=0)
        assert (await learner.expect(Published)).weight_version == 1, "weights go out before any frame is awaited"
        losses = await supervise(learner)
        assert losses[-1] < 0.7 * losses[0]
        assert (await learner.expect(CheckpointSaved)).step == 0
        assert [version for version, _ in learner.published] == [1, 2], "the last supervised step publishes"
        before = model_of(learner.published[-1][1])
        for step in range(3):
            done = await reinforce(learner, step)
            assert (done.kind, done.step) == ("rl", step)
            assert {"loss", "grad_norm", "clipfrac", "entropy", "mismatch_kl", "tokens_per_s", "wait_s"} <= set(
                done.metrics
            )
        after = model_of(learner.published[-1][1])
        assert sequence_logprob(after, GOOD) > sequence_logprob(before, GOOD)
        assert sequence_logprob(after, BAD) < sequence_logprob(before, BAD)
        await learner.writer.send(PublishNow())
        assert (await learner.expect(Published)).weight_version == 6
        await learner.writer.send(Finish())
        saved = await learner.expect(CheckpointSaved)
        assert Path(saved.path).name == "step-000003.pt"
        assert await learner.exit_code(60) == 0
        last_weights = learner.published[-1][1]

    async with learner_process(CONFIG, tmp_path, resume=True) as learner:
        hello = await learner.expect(Hello)
        assert hello == Hello(phase_steps_sft=SFT_STEPS, step=3, next_delivery_seq=24, weight_version=6)
        published = await learner.expect(Published)
        assert (published.weight_version, published.step) == (7, 3)
        assert learner.published == [(7, last_weights)], "the very same weights under a new version"
        assert (await reinforce(learner, 3)).step == 3


async def test_a_killed_learner_is_a_fault_in_the_engine(tmp_path: Path) -> None:
    async with learner_process(CONFIG, tmp_path) as learner:
        await learner.expect(Published)
        learner.process.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(LearnerFault):
            await reinforce(learner, 0)
        assert time.monotonic() - began < 2
        with pytest.raises(LearnerFault):
            await learner.writer.receive()


async def test_it_dies_with_its_parent_even_while_it_computes(tmp_path: Path) -> None:
    async with learner_process(CONFIG, tmp_path) as learner:
        await learner.expect(Published)
        long = SftExample(token_ids=[1] * 32, loss_mask=[False] + [True] * 31)
        frames = sft_frames([long] * 20_000, step=0)
        await learner.writer.write(frames[0])
        await anyio.to_thread.run_sync(wait_until_read, learner.writer)
        learner.orphan()
        assert await learner.exit_code(2.0) == EXIT_ORPHANED


async def test_a_step_out_of_order_ends_it_with_a_reason(tmp_path: Path) -> None:
    engine, learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def train() -> None:
        with pytest.raises(TrainingError, match="out of order"):
            run(CONFIG, lane=learner, weights=None, run_dir=tmp_path)

    async with LaneWriter(engine, slots=1, slot_bytes=1 << 16) as writer, anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, train)
        assert isinstance(await writer.receive(), Hello)
        assert isinstance(await writer.receive(), Published)
        made = group(0, [(GOOD, 2), (BAD, 2)], [1.0, 0.0], [0.5, -0.5])
        await writer.write(rl_frames([made], step=5)[0])
        message = await writer.receive()
        assert isinstance(message, LearnerError)
        assert "rl step 5 came out of order: step 0 was due" in message.message
