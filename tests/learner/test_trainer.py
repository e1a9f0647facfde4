"""Optimizer steps in one process: what is learned, what is masked, what survives a checkpoint."""

from __future__ import annotations

import errno
import itertools
import math
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from step_helpers import group, rl_batch, step_batch

from learner import checkpoint
from learner.checkpoint import Progress
from learner.errors import CheckpointError, TrainingError
from learner.flat import flat_nbytes, read_flat, write_flat
from learner.model import Decoder, DecoderConfig
from learner.publish import Publisher
from learner.trainer import Trainer
from rollout.config.learner import LearnerConfig, RlConfig, SftConfig
from rollout.lane.errors import WeightsFault

CPU = torch.device("cpu")
SIZES = DecoderConfig(vocab_size=20, eos_token_id=0, dim=32, layers=2, heads=2, max_len=32)


def trainer(**fields: object) -> Trainer:
    torch.manual_seed(0)
    return Trainer(Decoder(SIZES, seed=1), LearnerConfig(**fields), CPU)


def weights_of(one: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in one.model.parameters()]


def some_groups(rewards: list[float | None], advantages: list[float]) -> list:
    sequences = [([1, 2, 3 + i, 4 + i, 5 + i, 0], 2) for i in range(len(rewards))]
    return [group(0, sequences, rewards, advantages)]


def test_supervised_steps_lower_the_loss_and_the_learning_rate() -> None:
    one = trainer(sft=SftConfig(steps=20, lr=3e-3))
    metrics = [one.sft_step(step_batch([8, 12, 9, 15], vocab_size=20, step=step)) for step in range(20)]
    assert metrics[-1]["loss"] < 0.6 * metrics[0]["loss"]
    assert metrics[0]["lr"] == 3e-3
    assert metrics[-1]["lr"] == pytest.approx(3e-3 / 20)
    assert one.progress.sft_steps == 20


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("old_logprobs", ["behaviour", "recompute"])
def test_rewarded_sequences_become_likelier_than_their_siblings(loss_type: str, old_logprobs: str) -> None:
    one = trainer(rl=RlConfig(loss_type=loss_type, lr=3e-3, minibatches=2, old_logprobs=old_logprobs))
    batch = rl_batch(some_groups([1.0, 0.0, 1.0, 0.0], [0.5, -0.5, 0.5, -0.5]))
    before = one._recomputed(batch)
    for _ in range(3):
        batch.behaviour.copy_(one._recomputed(batch))
        metrics = one.rl_step(batch)
    after = one._recomputed(batch)
    gain = torch.zeros(4).index_add_(0, batch.token_traj, after - before)
    assert gain[0] > gain[1]
    assert gain[2] > gain[3]
    assert gain[0] > 0
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["reward"] == 0.5
    assert one.progress.step == 3


def test_a_trajectory_without_a_valid_reward_trains_nothing() -> None:
    masked, absent = trainer(rl=RlConfig(minibatches=1)), trainer(rl=RlConfig(minibatches=1))
    metrics = masked.rl_step(rl_batch(some_groups([1.0, 0.0, None], [0.5, -0.5, 9.0])))
    absent.rl_step(rl_batch(some_groups([1.0, 0.0], [0.5, -0.5])))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights_of(masked), weights_of(absent), strict=True))
    assert metrics["reward"] == 0.5
    assert metrics["valid_fraction"] == pytest.approx(2 / 3)


def test_a_step_of_nothing_valid_moves_no_weight() -> None:
    one = trainer()
    before = weights_of(one)
    metrics = one.rl_step(rl_batch(some_groups([None, None], [0.0, 0.0])))
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(one), strict=True))
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("token_budget", [6, 12, 1000])
def test_the_token_budget_does_not_change_the_step(token_budget: int) -> None:
    groups = some_groups([1.0, 0.0, 1.0, 0.0, 0.0], [0.6, -0.4, 0.6, -0.4, -0.4])
    one, reference = trainer(token_budget=token_budget), trainer()
    metrics, expected = one.rl_step(rl_batch(groups)), reference.rl_step(rl_batch(groups))
    for key in ("loss", "grad_norm", "entropy", "mismatch_kl", "clipfrac"):
        assert metrics[key] == pytest.approx(expected[key], abs=1e-5)


def test_mini_batches_share_out_every_trajectory_once_and_reproducibly() -> None:
    one = trainer(rl=RlConfig(minibatches=3))
    batch = rl_batch([group(i, [([1, 2, 3], 1)] * 4, [1.0] * 4, [0.0] * 4) for i in range(2)])
    shares = one._shares(batch)
    assert sorted(itertools.chain.from_iterable(shares)) == list(range(8))
    assert sorted(map(len, shares)) == [2, 3, 3]
    assert shares == one._shares(batch)


def test_staleness_is_counted_in_published_versions() -> None:
    one = trainer()
    one.progress.weight_version = 5
    sequences = [([1, 2, 3], 1), ([1, 2, 4], 1)]
    metrics = one.rl_step(rl_batch([group(0, sequences, [1.0, 0.0], [0.5, -0.5], version=3)]))
    assert metrics["staleness_max"] == 2
    assert one.progress.next_delivery_seq == 2


def test_a_diverged_step_leaves_the_weights_as_they_were() -> None:
    one = trainer()
    before = weights_of(one)
    batch = rl_batch(some_groups([1.0, 0.0], [0.5, -0.5]))
    batch.advantages.fill_(math.nan)
    with pytest.raises(TrainingError, match="diverged"):
        one.rl_step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(one), strict=True))


def test_a_restored_learner_takes_the_very_same_next_step(tmp_path: Path) -> None:
    config = {"sft": SftConfig(steps=2)}
    one = trainer(**config)
    for step in range(2):
        one.sft_step(step_batch([8, 12], vocab_size=20, step=step))
    one.rl_step(rl_batch(some_groups([1.0, 0.0], [0.5, -0.5])))
    checkpoint.save(tmp_path, one.progress, one.state(), keep=2)
    other = trainer(**config)
    saved = checkpoint.load_newest(tmp_path)
    assert saved is not None
    other.restore(*saved)
    assert other.progress == one.progress
    batch = rl_batch(some_groups([0.0, 1.0], [-0.5, 0.5]), step=1)
    drop = ("compute_s", "tokens_per_s")
    first, second = one.rl_step(batch), other.rl_step(batch)
    assert {k: v for k, v in first.items() if k not in drop} == {k: v for k, v in second.items() if k not in drop}
    assert all(torch.equal(a, b) for a, b in zip(weights_of(one), weights_of(other), strict=True))


def test_only_the_newest_checkpoints_are_kept_and_rl_follows_sft(tmp_path: Path) -> None:
    state = trainer().state()
    (tmp_path / ".step-000001.pt.1.tmp").write_bytes(b"left by a killed learner")
    for progress in (Progress(sft_steps=900), Progress(sft_steps=1000), Progress(sft_steps=1000, step=2)):
        checkpoint.save(tmp_path, progress, state, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sft-001000.pt", "step-000002.pt"]
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    assert loaded[0].step == 2


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty"])
def test_a_damaged_checkpoint_is_refused_and_the_older_one_used(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = trainer().state()
    checkpoint.save(tmp_path, Progress(step=1), state, keep=2)
    newest = checkpoint.save(tmp_path, Progress(step=2), state, keep=2)
    content = bytearray(newest.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    newest.write_bytes({"torn": content[: len(content) // 2], "flipped": content, "empty": b""}[damage])
    loaded = checkpoint.load_newest(tmp_path)
    assert loaded is not None
    assert loaded[0].step == 1
    assert "skipped" in capsys.readouterr().err
    (tmp_path / "step-000001.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of 2"):
        checkpoint.load_newest(tmp_path)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    other = Trainer(
        Decoder(DecoderConfig(vocab_size=21, eos_token_id=0, dim=32, heads=2), seed=1), LearnerConfig(), CPU
    )
    with pytest.raises(CheckpointError, match="another model"):
        trainer().restore(other.progress, other.state())


def test_a_version_is_never_reused_whatever_the_checkpoint_says(tmp_path: Path) -> None:
    model = Decoder(SIZES, seed=1)
    first = Publisher(None, model, tmp_path, newest_version=0, timeout_s=1)
    for version in (1, 2, 3):
        first.publish()
        assert first.version == version
    after_a_crash = Publisher(None, model, tmp_path, newest_version=1, timeout_s=1)
    after_a_crash.publish()
    assert after_a_crash.version == 4


def test_flat_weights_round_trip_and_refuse_another_size() -> None:
    one, other = Decoder(SIZES, seed=1), Decoder(SIZES, seed=2)
    buffer = memoryview(bytearray(flat_nbytes(one)))
    write_flat(one, buffer)
    read_flat(other, buffer.toreadonly())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    with pytest.raises(WeightsFault):
        write_flat(one, buffer[4:])


def test_a_checkpoint_of_other_sizes_is_refused_in_one_line_that_names_them() -> None:
    larger = DecoderConfig(vocab_size=20, eos_token_id=0, dim=64, layers=3, heads=2, max_len=32)
    other = Trainer(Decoder(larger, seed=1), LearnerConfig(), CPU)
    with pytest.raises(
        CheckpointError, match=r"\d+ tensors differ, first .* in the checkpoint, .* in the model"
    ) as caught:
        trainer().restore(other.progress, other.state())
    assert "\n" not in str(caught.value)


def test_the_largest_seed_shuffles_mini_batches() -> None:
    batch = rl_batch([group(0, [([1, 2, 3], 1)] * 4, [1.0] * 4, [0.0] * 4)])
    assert sorted(itertools.chain.from_iterable(trainer(seed=2**63 - 1)._shares(batch))) == [0, 1, 2, 3]


def test_a_full_disk_is_named_and_leaves_the_older_checkpoint_and_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trainer().state()
    checkpoint.save(tmp_path, Progress(step=1), state, keep=2)
    monkeypatch.setattr(checkpoint, "_remove_leftovers", lambda folder: None)
    (tmp_path / f".step-000002.pt.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"step-000002\.pt cannot be written: No space left on device"):
        checkpoint.save(tmp_path, Progress(step=2), state, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001.pt"]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to write past `num_bytes` of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("num_bytes", [0, 10_000, 60_000])
def test_a_disk_that_refuses_in_the_middle_of_a_checkpoint_leaves_no_half_file(tmp_path: Path, num_bytes: int) -> None:
    state = trainer().state()
    with file_size_limit(num_bytes), pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)):
        checkpoint.save(tmp_path, Progress(step=1), state, keep=2)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_the_version_counter_is_named(tmp_path: Path) -> None:
    publisher = Publisher(None, Decoder(SIZES, seed=1), tmp_path, newest_version=0, timeout_s=1)
    with file_size_limit(0), pytest.raises(CheckpointError, match="weight_version cannot be written"):
        publisher.publish()
