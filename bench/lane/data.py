"""What travels in `bench lane`: one large packed batch, the same as trajectories, and a small step.

Invariant: the same seed gives the same data, and every path carries the same three columns per token (9 bytes).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.lane.batch import Frame, FrameCounts, FrameMeta, FrameParts
from rollout.lane.packing import DeliveredGroup, rl_frames
from rollout.types import STOP_REASON_CODES, Group, Reward, StopReason, Trajectory, Verdict, VersionSpan

TOKEN_BYTES = 9
_VOCABULARY = 50_000
_PIECE_TOKENS = 1 << 16
"""Tokens copied between two yields: a tenth of a millisecond."""


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """A packed batch: the columns that dominate it."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    cu_seqlens: NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        """Bytes of the token columns."""
        return TOKEN_BYTES * len(self.token_ids)


def make_columns(num_sequences: int, mean_tokens: int, seed: int = 0) -> Columns:
    """Sequences of half to one and a half times `mean_tokens`; the first half of each is prompt."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(mean_tokens // 2, mean_tokens * 3 // 2, num_sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(ends[-1])
    mask = np.zeros(total, np.uint8)
    for start, end in itertools.pairwise(ends):
        mask[(start + end + 1) // 2 : end] = 1
    return Columns(
        token_ids=rng.integers(0, _VOCABULARY, total, dtype=np.int32),
        loss_mask=mask,
        logprobs=(-rng.random(total, np.float32) * mask).astype(np.float32),
        cu_seqlens=ends,
    )


def split(columns: Columns) -> list[tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float32]]]:
    """One triple of arrays per sequence, each with memory of its own."""
    bounds = zip(columns.cu_seqlens[:-1], columns.cu_seqlens[1:], strict=True)
    return [
        (columns.token_ids[a:b].copy(), columns.loss_mask[a:b].copy(), columns.logprobs[a:b].copy()) for a, b in bounds
    ]


def make_groups(columns: Columns, group_size: int) -> list[DeliveredGroup]:
    """The same batch as the engine holds it: groups of trajectories with Python lists."""
    trajectories = [_trajectory(index, group_size, *arrays) for index, arrays in enumerate(split(columns))]
    groups = []
    for start in range(0, len(trajectories), group_size):
        members = tuple(trajectories[start : start + group_size])
        group = Group(group_id=start // group_size, task_id="t", trajectories=members, advantages=(0.0,) * len(members))
        seqs = tuple(range(start, start + len(members)))
        groups.append(DeliveredGroup(group=group, delivery_seqs=seqs))
    return groups


def _trajectory(
    index: int, group_size: int, ids: NDArray[np.int32], mask: NDArray[np.uint8], logprobs: NDArray[np.float32]
) -> Trajectory:
    group_id, sibling = divmod(index, group_size)
    return Trajectory(
        trajectory_id=f"{group_id}/{sibling}/0",
        task_id="t",
        group_id=group_id,
        sibling=sibling,
        token_ids=ids.tolist(),
        loss_mask=mask.astype(bool).tolist(),
        logprobs=logprobs.tolist(),
        spans=(VersionSpan(0, len(ids), 1),),
        temperature=1.0,
        turns=(),
        verdict=Verdict(task_id="t", reward=Reward(1.0)),
        stop_reason=StopReason.MAX_TOKENS,
    )


def packed_frame(columns: Columns) -> FrameParts:
    """A frame whose columns exist already: what the lane itself costs."""
    num = len(columns.cu_seqlens) - 1
    return FrameParts(
        meta=FrameMeta(kind="rl", step=0, last_of_step=False),
        counts=FrameCounts(len(columns.token_ids), num, num, 0),
        fill=partial(_fill_packed, columns),
    )


def group_frame(groups: Sequence[DeliveredGroup]) -> FrameParts:
    """A frame that is packed from trajectories when it is written, as the engine does."""
    (parts,) = rl_frames(groups, step=0, max_tokens=1 << 24)
    return with_last(parts, last=False)


def with_last(parts: FrameParts, *, last: bool) -> FrameParts:
    """The same frame as the last of its step, or not."""
    return dataclasses.replace(parts, meta=msgspec.structs.replace(parts.meta, last_of_step=last))


def arrays_of(groups: Sequence[DeliveredGroup]) -> list[tuple[NDArray[np.int32], ...]]:
    """What one sends through a queue instead: arrays of each trajectory, made from its lists."""
    return [
        (np.asarray(one.token_ids, np.int32), np.asarray(one.loss_mask, np.uint8), np.asarray(one.logprobs, np.float32))
        for delivered in groups
        for one in delivered.group.trajectories
    ]


def _fill_packed(columns: Columns, frame: Frame) -> Iterator[None]:
    num = len(columns.cu_seqlens) - 1
    frame.cu_seqlens[:] = columns.cu_seqlens
    frame.seq_traj[:] = np.arange(num)
    frame.rewards[:] = 1.0
    frame.advantages[:] = 0.0
    frame.traj_valid[:] = 1
    frame.stop_reason[:] = STOP_REASON_CODES[StopReason.MAX_TOKENS]
    frame.group_id[:] = np.arange(num)
    frame.group_n[:] = 1
    frame.delivery_seq[:] = np.arange(num)
    frame.temperature[:] = 1.0
    for start in range(0, len(columns.token_ids), _PIECE_TOKENS):
        piece = slice(start, start + _PIECE_TOKENS)
        frame.token_ids[piece] = columns.token_ids[piece]
        frame.loss_mask[piece] = columns.loss_mask[piece]
        frame.logprobs[piece] = columns.logprobs[piece]
        yield
