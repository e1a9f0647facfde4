"""Turns groups and demonstrations into frames. Pure: no I/O, nothing kept.

Invariant: a frame holds complete groups only, in the order given; a trajectory's columns are copied
token by token as they are; and only the last frame of a step says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from rollout.lane.batch import Frame, FrameCounts, FrameMeta, FrameParts
from rollout.lane.errors import LaneFault
from rollout.types import STOP_REASON_CODES, Group, Reward, Trajectory

MAX_FRAME_TOKENS = 1 << 20
_PIECE_TOKENS = 2048
"""Tokens converted between two yields: about a quarter of a millisecond."""

T = TypeVar("T")


class DeliveredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group with what the journal gave it."""

    group: Group
    delivery_seqs: tuple[int, ...]
    """Global delivery number of each trajectory, in the group's order."""


class SftExample(msgspec.Struct, frozen=True, kw_only=True):
    """One demonstration: columns of equal length T ≥ 2."""

    token_ids: Sequence[int]
    loss_mask: Sequence[bool]
    """True on the tokens to imitate; the first token cannot be one."""


def rl_frames(groups: Sequence[DeliveredGroup], *, step: int, max_tokens: int = MAX_FRAME_TOKENS) -> list[FrameParts]:
    """Frames of one RL step.

    Args:
        groups: at least one, each with one advantage and one delivery number per trajectory.
        step: RL steps done before this one.
        max_tokens: a frame closes before it would exceed this; a larger group has a frame of its own.

    Raises:
        LaneFault: a column's length does not match, or a trajectory's first token is to be trained on.
    """
    for delivered in groups:
        _check_group(delivered)
    batches = _split(groups, max_tokens, lambda one: sum(len(t.token_ids) for t in one.group.trajectories))
    return [
        FrameParts(
            meta=FrameMeta(kind="rl", step=step, last_of_step=batch is batches[-1]),
            counts=_rl_counts(batch),
            fill=partial(_fill_rl, batch),
        )
        for batch in batches
    ]


def sft_frames(examples: Sequence[SftExample], *, step: int, max_tokens: int = MAX_FRAME_TOKENS) -> list[FrameParts]:
    """Frames of one SFT step; arguments and errors as `rl_frames`."""
    for index, example in enumerate(examples):
        _check_columns(f"demonstration {index}", example.loss_mask, example.token_ids)
    batches = _split(examples, max_tokens, lambda one: len(one.token_ids))
    return [
        FrameParts(
            meta=FrameMeta(kind="sft", step=step, last_of_step=batch is batches[-1]),
            counts=FrameCounts(sum(len(one.token_ids) for one in batch), len(batch), len(batch), 0),
            fill=partial(_fill_sft, batch),
        )
        for batch in batches
    ]


def _split(items: Sequence[T], max_tokens: int, num_tokens: Callable[[T], int]) -> list[list[T]]:
    batches: list[list[T]] = []
    room = 0
    for item in items:
        need = num_tokens(item)
        if not batches or need > room:
            batches.append([])
            room = max_tokens
        batches[-1].append(item)
        room -= need
    if not batches:
        raise LaneFault("a step needs at least one group or demonstration")
    return batches


def _rl_counts(batch: list[DeliveredGroup]) -> FrameCounts:
    trajectories = [one for delivered in batch for one in delivered.group.trajectories]
    return FrameCounts(
        num_tokens=sum(len(one.token_ids) for one in trajectories),
        num_sequences=len(trajectories),
        num_trajectories=len(trajectories),
        num_spans=sum(len(one.spans) for one in trajectories),
    )


def _fill_rl(batch: list[DeliveredGroup], frame: Frame) -> Iterator[None]:
    frame.cu_seqlens[0] = 0
    row = at = piece = span_row = 0
    for delivered in batch:
        group = delivered.group
        for sibling, trajectory in enumerate(group.trajectories):
            end = at + len(trajectory.token_ids)
            frame.token_ids[at:end] = trajectory.token_ids
            frame.loss_mask[at:end] = trajectory.loss_mask
            frame.logprobs[at:end] = trajectory.logprobs
            frame.cu_seqlens[row + 1] = end
            frame.seq_traj[row] = row
            reward = trajectory.reward
            frame.traj_valid[row] = isinstance(reward, Reward)
            frame.rewards[row] = reward.value if isinstance(reward, Reward) else 0.0
            frame.advantages[row] = group.advantages[sibling]
            frame.stop_reason[row] = STOP_REASON_CODES[trajectory.stop_reason]
            frame.group_id[row] = group.group_id
            frame.group_n[row] = len(group.trajectories)
            frame.delivery_seq[row] = delivered.delivery_seqs[sibling]
            frame.temperature[row] = trajectory.temperature
            for span in trajectory.spans:
                frame.spans[span_row : span_row + 4] = (row, span.start, span.end, span.version)
                span_row += 4
            row, piece, at = row + 1, piece + end - at, end
            if piece >= _PIECE_TOKENS:
                piece = 0
                yield


def _fill_sft(batch: list[SftExample], frame: Frame) -> Iterator[None]:
    for column in (frame.logprobs, frame.rewards, frame.advantages, frame.stop_reason):
        column[:] = 0
    for unknown in (frame.group_id, frame.delivery_seq):
        unknown[:] = -1
    frame.traj_valid[:] = 1
    frame.group_n[:] = 1
    frame.temperature[:] = 1.0
    frame.cu_seqlens[0] = 0
    at = piece = 0
    for row, example in enumerate(batch):
        end = at + len(example.token_ids)
        frame.token_ids[at:end] = example.token_ids
        frame.loss_mask[at:end] = example.loss_mask
        frame.cu_seqlens[row + 1] = end
        frame.seq_traj[row] = row
        piece, at = piece + end - at, end
        if piece >= _PIECE_TOKENS:
            piece = 0
            yield


def _check_group(delivered: DeliveredGroup) -> None:
    group = delivered.group
    num = len(group.trajectories)
    if not num or len(group.advantages) != num or len(delivered.delivery_seqs) != num:
        raise LaneFault(
            f"group {group.group_id}: {num} trajectories, {len(group.advantages)} advantages, "
            f"{len(delivered.delivery_seqs)} delivery numbers"
        )
    for one in group.trajectories:
        _check_trajectory(one)


def _check_trajectory(one: Trajectory) -> None:
    _check_columns(one.trajectory_id, one.loss_mask, one.token_ids, one.logprobs)


def _check_columns(name: str, loss_mask: Sequence[bool], *columns: Sequence[object]) -> None:
    if any(len(column) != len(loss_mask) for column in columns):
        raise LaneFault(f"{name}: columns of different length: {[len(loss_mask), *map(len, columns)]}")
    if loss_mask and loss_mask[0]:
        raise LaneFault(f"{name}: the first token has no context and cannot be trained on")
