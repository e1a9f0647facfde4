"""Frames hold exactly the columns of the groups they were made from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_helpers import delivered

from rollout.lane.batch import ALIGNMENT_BYTES, COLUMNS, Frame, FrameParts, open_frame, write_frame
from rollout.lane.errors import FrameDamaged, LaneFault
from rollout.lane.packing import DeliveredGroup, SftExample, rl_frames, sft_frames
from rollout.types import STOP_REASON_CODES, Reward


def written(parts: FrameParts) -> memoryview:
    view = memoryview(bytearray(parts.nbytes))
    for _ in write_frame(view, parts, generation=1, seq=0):
        pass
    return view


def opened(parts: FrameParts) -> Frame:
    return open_frame(written(parts), generation=1, seq=0)


def assert_holds(frame: Frame, groups: list[DeliveredGroup]) -> None:
    row = 0
    for one in groups:
        for sibling, trajectory in enumerate(one.group.trajectories):
            start, end = frame.cu_seqlens[row : row + 2]
            assert frame.seq_traj[row] == row
            assert frame.token_ids[start:end].tolist() == trajectory.token_ids
            assert frame.loss_mask[start:end].astype(bool).tolist() == trajectory.loss_mask
            assert np.array_equal(frame.logprobs[start:end], np.float32(trajectory.logprobs))
            assert frame.advantages[row] == np.float32(one.group.advantages[sibling])
            assert bool(frame.traj_valid[row]) == isinstance(trajectory.reward, Reward)
            assert frame.group_id[row] == one.group.group_id
            assert frame.group_n[row] == len(one.group.trajectories)
            assert frame.delivery_seq[row] == one.delivery_seqs[sibling]
            assert frame.temperature[row] == np.float32(trajectory.temperature)
            assert frame.stop_reason[row] == STOP_REASON_CODES[trajectory.stop_reason]
            spans = [tuple(span) for span in frame.spans.reshape(-1, 4) if span[0] == row]
            assert spans == [(row, span.start, span.end, span.version) for span in trajectory.spans]
            row += 1
    assert row == len(frame.rewards)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=5))
def test_every_column_survives_the_round_trip(lengths: list[list[int]]) -> None:
    groups = [delivered(index, sizes) for index, sizes in enumerate(lengths)]
    (parts,) = rl_frames(groups, step=7)
    frame = opened(parts)
    assert (frame.meta.kind, frame.meta.step, frame.meta.last_of_step) == ("rl", 7, True)
    assert_holds(frame, groups)


def test_an_invalid_reward_is_marked_and_never_zero_by_accident() -> None:
    frame = opened(rl_frames([delivered(1, [4, 4, 4], [1.0, None, 0.0])], step=0)[0])
    assert frame.traj_valid.tolist() == [1, 0, 1]
    assert frame.rewards.tolist() == [1.0, 0.0, 0.0]


def test_every_column_starts_on_a_64_byte_boundary() -> None:
    parts = rl_frames([delivered(1, [3, 5])], step=0)[0]
    view = written(parts)
    frame = open_frame(view, generation=1, seq=0)
    base = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    for column in COLUMNS:
        at = getattr(frame, column.name).__array_interface__["data"][0]
        assert (at - base) % ALIGNMENT_BYTES == 0, column.name


def test_a_step_splits_into_frames_of_complete_groups() -> None:
    groups = [delivered(index, [10, 10]) for index in range(5)] + [delivered(9, [200, 200])]
    frames = rl_frames(groups, step=3, max_tokens=45)
    assert [parts.counts.num_trajectories for parts in frames] == [4, 4, 2, 2]
    assert [parts.meta.last_of_step for parts in frames] == [False, False, False, True]
    assert frames[-1].counts.num_tokens == 400
    assert_holds(opened(frames[1]), groups[2:4])


def test_demonstrations_are_trajectories_without_reward() -> None:
    examples = [SftExample(token_ids=[1, 2, 3], loss_mask=[False, True, True]) for _ in range(3)]
    frame = opened(sft_frames(examples, step=0)[0])
    assert frame.meta.kind == "sft"
    assert frame.token_ids.tolist() == [1, 2, 3] * 3
    assert frame.cu_seqlens.tolist() == [0, 3, 6, 9]
    assert frame.delivery_seq.tolist() == [-1] * 3
    assert frame.traj_valid.tolist() == [1] * 3
    assert not frame.advantages.any()


@pytest.mark.parametrize("at", [3, 90, 150, 700, -70])
def test_a_flipped_bit_anywhere_is_detected(at: int) -> None:
    view = written(rl_frames([delivered(1, [30, 30])], step=0)[0])
    view[at] ^= 4
    with pytest.raises(FrameDamaged):
        open_frame(view, generation=1, seq=0)


def test_a_frame_of_another_place_or_generation_is_refused() -> None:
    view = written(rl_frames([delivered(1, [3])], step=0)[0])
    for generation, seq in ((2, 0), (1, 1)):
        with pytest.raises(FrameDamaged, match="was due"):
            open_frame(view, generation=generation, seq=seq)


def test_columns_that_disagree_are_refused_before_anything_is_written() -> None:
    with pytest.raises(LaneFault, match="different length"):
        sft_frames([SftExample(token_ids=[1, 2], loss_mask=[False])], step=0)
    with pytest.raises(LaneFault, match="no context"):
        sft_frames([SftExample(token_ids=[1, 2], loss_mask=[True, True])], step=0)
    with pytest.raises(LaneFault, match="at least one"):
        rl_frames([], step=0)
