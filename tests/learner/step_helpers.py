"""Steps for the learner's tests, built through real frames."""

from __future__ import annotations

import random
from collections.abc import Sequence

from learner.reader import StepBatch, _copy, _join
from rollout.lane.batch import FrameParts, open_frame, write_frame
from rollout.lane.packing import DeliveredGroup, SftExample, rl_frames, sft_frames
from rollout.types import Group, Invalid, Reward, StopReason, Trajectory, Verdict, VersionSpan


def joined(frames: Sequence[FrameParts]) -> StepBatch:
    """The step that these frames make."""
    opened = []
    for seq, parts in enumerate(frames):
        view = memoryview(bytearray(parts.nbytes))
        for _ in write_frame(view, parts, generation=1, seq=seq):
            pass
        opened.append(_copy(open_frame(view, generation=1, seq=seq)))
    return _join(opened)


def step_batch(lengths: list[int], *, vocab_size: int, step: int = 0) -> StepBatch:
    """An SFT step of random sequences; their second halves are trained."""
    random_ = random.Random(7)
    examples = [
        SftExample(
            token_ids=[random_.randrange(vocab_size) for _ in range(length)],
            loss_mask=[index >= max(1, length // 2) for index in range(length)],
        )
        for length in lengths
    ]
    return joined(sft_frames(examples, step=step, max_tokens=30))


def group(
    group_id: int,
    sequences: Sequence[tuple[Sequence[int], int]],
    rewards: Sequence[float | None],
    advantages: Sequence[float],
    *,
    logprob: float = -1.0,
    version: int = 1,
) -> DeliveredGroup:
    """A delivered group; each sequence is (tokens, length of the prompt)."""
    trajectories = tuple(
        Trajectory(
            trajectory_id=f"{group_id}/{sibling}/0",
            task_id="task",
            group_id=group_id,
            sibling=sibling,
            token_ids=list(tokens),
            loss_mask=[index >= prompt for index in range(len(tokens))],
            logprobs=[logprob if index >= prompt else 0.0 for index in range(len(tokens))],
            spans=(VersionSpan(prompt, len(tokens), version),),
            temperature=1.0,
            turns=(),
            verdict=Verdict(task_id="task", reward=Invalid("fault") if reward is None else Reward(reward)),
            stop_reason=StopReason.SUBMITTED,
        )
        for sibling, ((tokens, prompt), reward) in enumerate(zip(sequences, rewards, strict=True))
    )
    numbers = tuple(group_id * len(trajectories) + sibling for sibling in range(len(trajectories)))
    made = Group(group_id=group_id, task_id="task", trajectories=trajectories, advantages=tuple(advantages))
    return DeliveredGroup(group=made, delivery_seqs=numbers)


def rl_batch(groups: Sequence[DeliveredGroup], *, step: int = 0) -> StepBatch:
    """The RL step of these groups."""
    return joined(rl_frames(groups, step=step))
