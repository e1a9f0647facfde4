"""Optimizer steps: a `StepBatch` in, changed weights and metrics out. No process, no lane, no disk.

Owns model, optimizer and progress. Invariant: gradients of one optimizer step use denominators of that
whole step; a step either happens completely or raises `TrainingError` before the weights are touched.

In RL the behaviour log-probabilities of the sampler are the `old` ones of the clipped ratio by default, for
every mini-batch of the batch: the ratio then covers both the staleness of the data and the drift between
mini-batches, and the truncated importance weight is 1. `old_logprobs = "recompute"` separates the two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from learner.checkpoint import Progress
from learner.errors import CheckpointError, TrainingError
from learner.loss import AGGREGATIONS, Aggregation, PolicyLossConfig, PolicySums, policy_loss, sft_loss, token_weights
from learner.microbatch import MicroBatch, micro_batches, score
from learner.reader import StepBatch
from rollout.config.learner import LearnerConfig


class Trainer:
    """Trains one model.

    Args:
        model: callable on [B, L] token ids, with `head_weight`; moved to the device here.
        config: of the learner.
        device: where to compute.
    """

    def __init__(self, model: nn.Module, config: LearnerConfig, device: torch.device) -> None:
        self.model = model.to(device)
        self.progress = Progress()
        self._config = config
        self._device = device
        self._optimizer = self._new_optimizer()

    def sft_step(self, batch: StepBatch) -> dict[str, float]:
        """One supervised step: mean cross-entropy over the trained tokens of the whole step."""
        began = time.monotonic()
        lr = self.config_sft_lr(self.progress.sft_steps)
        weights = token_weights(batch.mask, batch.token_traj, len(batch.rewards), "token_mean")
        loss = entropy = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for micro in self._micro_batches(batch, range(batch.num_sequences)):
            logprobs, entropies = self._score(batch, micro)
            part = sft_loss(logprobs, *self._on_device(micro, batch.mask, weights))
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            entropy += float(entropies.sum())
        grad_norm = self._apply(loss, lr)
        self.progress.sft_steps += 1
        if self.progress.sft_steps >= self._config.sft.steps:
            self._optimizer = self._new_optimizer()  # RL starts with moments of its own
        num_tokens = int(batch.mask.sum())
        metrics = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "entropy": entropy / max(num_tokens, 1)}
        return metrics | _throughput(batch, began)

    def rl_step(self, batch: StepBatch) -> dict[str, float]:
        """One RL step: `minibatches` optimizer steps over shares of the batch's trajectories."""
        began = time.monotonic()
        config = self._config.rl
        old = batch.behaviour if config.old_logprobs == "behaviour" else self._recomputed(batch)
        sums = PolicySums()
        loss = entropy = 0.0
        grad_norms = []
        shares = self._shares(batch)
        for sequences in shares:
            part = self._policy_step(batch, sequences, old, sums)
            loss += part[0] / len(shares)
            grad_norms.append(part[1])
            entropy += part[2]
        self.progress.step += 1
        self.progress.next_delivery_seq = max(self.progress.next_delivery_seq, batch.next_delivery_seq)
        metrics = {
            "loss": loss,
            "grad_norm": sum(grad_norms) / len(grad_norms),
            "lr": config.lr,
            "entropy": entropy / max(sums.num_tokens, 1.0),
            **sums.metrics(),
            **self._batch_metrics(batch),
        }
        return metrics | _throughput(batch, began)

    def config_sft_lr(self, step: int) -> float:
        """Learning rate of SFT step `step`: falls linearly to 0 after the last one."""
        sft = self._config.sft
        return sft.lr * max(0.0, 1 - step / max(sft.steps, 1))

    def state(self) -> dict[str, Any]:
        """Everything besides progress that a checkpoint needs; tensors and plain data."""
        cuda = torch.cuda.get_rng_state_all() if self._device.type == "cuda" else []
        return {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": {"sft_steps": self.progress.sft_steps, "step": self.progress.step},
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def restore(self, progress: Progress, state: dict[str, Any]) -> None:
        """Continues from a checkpoint.

        Raises:
            CheckpointError: it is of another model.
        """
        try:
            _check_fits(self.model.state_dict(), state["model"])
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"the checkpoint is of another model or optimizer: {first_line}") from error
        torch.set_rng_state(state["rng"]["cpu"])
        if self._device.type == "cuda" and state["rng"]["cuda"]:
            torch.cuda.set_rng_state_all(state["rng"]["cuda"])
        self.progress = Progress(**asdict(progress))

    def _policy_step(
        self, batch: StepBatch, sequences: Sequence[int], old: Tensor, sums: PolicySums
    ) -> tuple[float, float, float]:
        """One optimizer step; returns loss, gradient norm and the summed entropy."""
        rl = self._config.rl
        loss_config = PolicyLossConfig(clip_low=rl.clip_low, clip_high=rl.clip_high, tis_cap=rl.tis_cap)
        weights = self._share_weights(batch, sequences, AGGREGATIONS[rl.loss_type])
        advantages = batch.advantages[batch.token_traj]
        loss = entropy = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for micro in self._micro_batches(batch, sequences):
            logprobs, entropies = self._score(batch, micro)
            columns = self._on_device(micro, old, batch.behaviour, advantages, batch.mask, weights)
            part, part_sums = policy_loss(loss_config, logprobs, *columns)
            part.backward()  # type: ignore[no-untyped-call]
            loss += float(part.detach())
            entropy += float(entropies.sum())
            sums.add(part_sums)
        return loss, self._apply(loss, rl.lr), entropy

    def _share_weights(self, batch: StepBatch, sequences: Sequence[int], aggregation: Aggregation) -> Tensor:
        chosen = torch.zeros(batch.num_sequences, dtype=torch.bool)
        chosen[torch.tensor(sequences, dtype=torch.int64)] = True
        mask = batch.mask & chosen[batch.token_seq]
        length = float(self._config.rl.constant_length_tokens or self._config.model.max_len)
        return token_weights(mask, batch.token_traj, len(batch.rewards), aggregation, length)

    def _shares(self, batch: StepBatch) -> list[list[int]]:
        """Sequences of each mini-batch: whole trajectories, shuffled by seed and step, in equal shares."""
        # torch takes 64 bits of seed.
        generator = torch.Generator().manual_seed((self._config.seed * 1_000_003 + batch.step) % 2**63)
        num = len(batch.rewards)
        num_shares = max(1, min(self._config.rl.minibatches, num))
        share_of = torch.empty(num, dtype=torch.int64)
        share_of[torch.randperm(num, generator=generator)] = torch.arange(num) % num_shares
        share_of_sequence = share_of[batch.seq_traj]
        return [(share_of_sequence == share).nonzero()[:, 0].tolist() for share in range(num_shares)]

    @torch.no_grad()
    def _recomputed(self, batch: StepBatch) -> Tensor:
        """Log-probabilities [T] under the weights before the first mini-batch."""
        old = torch.zeros_like(batch.behaviour)
        for micro in self._micro_batches(batch, range(batch.num_sequences)):
            old[micro.token_index] = self._score(batch, micro)[0].cpu()
        return old

    def _apply(self, loss: float, lr: float) -> float:
        """Clips, steps, and returns the norm before clipping; with no gradient at all nothing moves."""
        parameters = [one for one in self.model.parameters() if one.grad is not None]
        if not parameters:
            return 0.0
        norm = float(nn.utils.clip_grad_norm_(parameters, self._config.max_grad_norm))
        if not (math.isfinite(norm) and math.isfinite(loss)):
            raise TrainingError(f"loss {loss}, gradient norm {norm}: training has diverged")
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return norm

    def _micro_batches(self, batch: StepBatch, sequences: Sequence[int]) -> list[MicroBatch]:
        return list(micro_batches(batch, sequences, self._config.token_budget))

    def _score(self, batch: StepBatch, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        chunk = self._config.logprob_chunk_tokens
        return score(self.model, batch, micro, device=self._device, chunk_tokens=chunk)  # type: ignore[arg-type]

    def _on_device(self, micro: MicroBatch, *columns: Tensor) -> tuple[Tensor, ...]:
        return tuple(column[micro.token_index].to(self._device) for column in columns)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.model.parameters(),
            lr=self._config.rl.lr,
            betas=self._config.betas,
            weight_decay=self._config.weight_decay,
            fused=True,
        )

    def _batch_metrics(self, batch: StepBatch) -> dict[str, float]:
        valid = batch.valid
        num_valid = max(int(valid.sum()), 1)
        known = batch.oldest_version >= 0
        staleness = (self.progress.weight_version - batch.oldest_version[known]).clamp(min=0).float()
        return {
            "reward": float(batch.rewards[valid].sum()) / num_valid,
            "valid_fraction": float(valid.float().mean()),
            "zero_advantage_fraction": float((batch.advantages[valid] == 0).float().sum()) / num_valid,
            "staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
            "staleness_max": float(staleness.max()) if len(staleness) else 0.0,
        }


def _check_fits(model: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Says in one line how a checkpoint's tensors differ from the model's."""
    ours = {name: tuple(tensor.shape) for name, tensor in model.items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    differing = [name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        raise CheckpointError(
            f"the checkpoint is of another model than config.json describes: {len(differing)} tensors differ, "
            f"first {name}: {theirs.get(name, 'absent')} in the checkpoint, {ours.get(name, 'absent')} in the model; "
            "undo the change of learner.model, or start a new run"
        )


def _throughput(batch: StepBatch, began: float) -> dict[str, float]:
    compute_s = time.monotonic() - began
    return {
        "tokens": float(len(batch.token_ids)),
        "trained_tokens": float(batch.mask.sum()),
        "trajectories": float(len(batch.rewards)),
        "compute_s": compute_s,
        "tokens_per_s": len(batch.token_ids) / max(compute_s, 1e-9),
    }
