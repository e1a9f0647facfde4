"""Trajectories and lanes for the lane's tests."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.to_thread

from rollout.lane.packing import DeliveredGroup
from rollout.lane.ring import LaneReader, LaneWriter
from rollout.types import Group, Invalid, Reward, StopReason, Trajectory, Verdict, VersionSpan


def trajectory(group_id: int, sibling: int, num_tokens: int, reward: float | None = 1.0, seed: int = 0) -> Trajectory:
    """A trajectory with random columns; the first half is the prompt. `reward` None is an invalid one."""
    random_ = random.Random(f"{seed}/{group_id}/{sibling}")
    mask = [index >= max(1, num_tokens // 2) for index in range(num_tokens)]
    return Trajectory(
        trajectory_id=f"{group_id}/{sibling}/0",
        task_id=f"task-{group_id}",
        group_id=group_id,
        sibling=sibling,
        token_ids=[random_.randrange(50_000) for _ in range(num_tokens)],
        loss_mask=mask,
        logprobs=[random_.uniform(-5, 0) if on else 0.0 for on in mask],
        spans=(VersionSpan(num_tokens // 2, num_tokens, 3),),
        temperature=0.8,
        turns=(),
        verdict=Verdict(task_id="t", reward=Invalid("judge died") if reward is None else Reward(reward)),
        stop_reason=StopReason.MAX_TOKENS,
    )


def delivered(group_id: int, lengths: list[int], rewards: list[float | None] | None = None) -> DeliveredGroup:
    """A group of one trajectory per length, with advantages -0.5, 0.5, 1.5 … and delivery numbers from 100·id."""
    rewards = rewards or [1.0] * len(lengths)
    trajectories = tuple(
        trajectory(group_id, sibling, length, reward)
        for sibling, (length, reward) in enumerate(zip(lengths, rewards, strict=True))
    )
    advantages = tuple(sibling - 0.5 for sibling in range(len(lengths)))
    group = Group(group_id=group_id, task_id=f"task-{group_id}", trajectories=trajectories, advantages=advantages)
    return DeliveredGroup(group=group, delivery_seqs=tuple(100 * group_id + i for i in range(len(lengths))))


@asynccontextmanager
async def lane(slots: int = 2, slot_bytes: int = 1 << 16) -> AsyncIterator[tuple[LaneWriter, LaneReader]]:
    """Both ends of a lane in this process."""
    engine, learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    async with LaneWriter(engine, slots=slots, slot_bytes=slot_bytes) as writer:
        reader = await anyio.to_thread.run_sync(lambda: LaneReader(learner, timeout_s=5))
        try:
            yield writer, reader
        finally:
            reader.close()
