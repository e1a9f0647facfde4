"""Collects the frames of one step from the lane into plain tensors.

Owns the copy. Invariant: a slot is given back as soon as its frame is copied, so that a step may span
any number of frames while one slot suffices; what is returned shares no memory with the lane.

Shapes: T tokens, S sequences, N trajectories of the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.errors import TrainingError
from rollout.lane.batch import Frame
from rollout.lane.ring import LaneReader

FRAME_TIMEOUT_S = 300.0
"""Between two frames of one step; the engine sends them back to back."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything of one step, on the CPU, flat over sequences."""

    kind: Literal["sft", "rl"]
    step: int
    token_ids: Tensor
    """[T] int64"""
    mask: Tensor
    """[T] bool: to be trained on; False throughout trajectories without a valid reward."""
    behaviour: Tensor
    """[T] float32"""
    cu_seqlens: Tensor
    """[S+1] int64"""
    token_seq: Tensor
    """[T] int64 sequence of each token"""
    seq_traj: Tensor
    """[S] int64"""
    rewards: Tensor
    """[N] float32"""
    advantages: Tensor
    """[N] float32"""
    valid: Tensor
    """[N] bool"""
    temperature: Tensor
    """[N] float32"""
    group_id: Tensor
    """[N] int64"""
    oldest_version: Tensor
    """[N] int64: smallest weight version of any sampled token; -1 where there is none."""
    next_delivery_seq: int
    """One more than the greatest delivery number in the step; 0 in SFT."""

    @property
    def num_sequences(self) -> int:
        """S"""
        return len(self.seq_traj)

    @property
    def lengths(self) -> Tensor:
        """[S] int64 tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def token_traj(self) -> Tensor:
        """[T] int64 trajectory of each token."""
        return self.seq_traj[self.token_seq]


def read_step(reader: LaneReader, *, kind: Literal["sft", "rl"] | None = None, step: int | None = None) -> StepBatch:
    """Reads frames until the last one of a step.

    Args:
        reader: the lane.
        kind: what is expected; None for either.
        step: the index expected; None for any.

    Raises:
        TrainingError: another step or kind than expected, or mixed frames: something was lost or repeated.
        LaneFault, TimeoutError: from the lane.
    """
    frames: list[Frame] = []
    while not frames or not frames[-1].meta.last_of_step:
        with reader.lease(FRAME_TIMEOUT_S) as frame:
            frames.append(_copy(frame))
        first, last = frames[0].meta, frames[-1].meta
        due = (kind or first.kind, first.step if step is None else step)
        if (last.kind, last.step) != due:
            raise TrainingError(f"a frame of {last.kind} step {last.step} came where {due[0]} step {due[1]} was due")
    return _join(frames)


def _copy(frame: Frame) -> Frame:
    """Copies every column at once; the source stays as it is."""
    columns = {name: getattr(frame, name) for name in Frame.__slots__ if name not in ("meta", "seq")}
    return Frame(meta=frame.meta, seq=frame.seq, **{name: view.copy() for name, view in columns.items()})


def _join(frames: list[Frame]) -> StepBatch:
    for frame in frames:
        _check(frame)
    token_base = np.cumsum([0, *(len(frame.token_ids) for frame in frames)])
    traj_base = np.cumsum([0, *(len(frame.rewards) for frame in frames)])
    cu_seqlens = np.concatenate(
        [[0], *(frame.cu_seqlens[1:] + base for frame, base in zip(frames, token_base, strict=False))]
    )
    seq_traj = np.concatenate([frame.seq_traj + base for frame, base in zip(frames, traj_base, strict=False)])
    valid = _cat([frame.traj_valid for frame in frames], np.bool_)
    trained = _cat([frame.loss_mask for frame in frames], np.bool_)
    token_seq = np.repeat(np.arange(len(seq_traj)), np.diff(cu_seqlens))
    mask = np.logical_and(trained, valid[seq_traj[token_seq]])
    return StepBatch(
        kind=frames[0].meta.kind,
        step=frames[0].meta.step,
        token_ids=torch.from_numpy(_cat([frame.token_ids for frame in frames], np.int64)),
        mask=torch.from_numpy(mask),
        behaviour=torch.from_numpy(_cat([frame.logprobs for frame in frames], np.float32)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int64)),
        token_seq=torch.from_numpy(token_seq.astype(np.int64)),
        seq_traj=torch.from_numpy(seq_traj.astype(np.int64)),
        rewards=torch.from_numpy(_cat([frame.rewards for frame in frames], np.float32)),
        advantages=torch.from_numpy(_cat([frame.advantages for frame in frames], np.float32)),
        valid=torch.from_numpy(valid),
        temperature=torch.from_numpy(_cat([frame.temperature for frame in frames], np.float32)),
        group_id=torch.from_numpy(_cat([frame.group_id for frame in frames], np.int64)),
        oldest_version=torch.from_numpy(np.concatenate([_oldest_versions(frame) for frame in frames])),
        next_delivery_seq=1 + max(int(frame.delivery_seq.max(initial=-1)) for frame in frames),
    )


def _cat(columns: list[NDArray[np.generic]], dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.concatenate(columns).astype(dtype)


def _oldest_versions(frame: Frame) -> NDArray[np.int64]:
    unknown = np.iinfo(np.int64).max
    oldest = np.full(len(frame.rewards), unknown, np.int64)
    spans = frame.spans.reshape(-1, 4)
    np.minimum.at(oldest, spans[:, 0], spans[:, 3])
    oldest[oldest == unknown] = -1
    return oldest


def _check(frame: Frame) -> None:
    """What checksums cannot tell: that the columns fit each other."""
    ends = frame.cu_seqlens
    ordered = ends[0] == 0 and ends[-1] == len(frame.token_ids) and bool((np.diff(ends) >= 0).all())
    num = len(frame.rewards)
    inside = bool(((frame.seq_traj >= 0) & (frame.seq_traj < num)).all())
    spans_inside = bool(((frame.spans[::4] >= 0) & (frame.spans[::4] < num)).all())
    if not (ordered and inside and spans_inside):
        raise TrainingError(f"frame {frame.seq}: its columns contradict each other")
    if bool((frame.temperature <= 0).any()) and frame.meta.kind == "rl":
        raise TrainingError(f"frame {frame.seq}: trajectories sampled greedily have no log-probabilities to train on")
    starts = ends[:-1][np.diff(ends) > 0]
    if frame.loss_mask[starts].any():
        raise TrainingError(f"frame {frame.seq}: a first token is to be trained on, but nothing predicts it")
