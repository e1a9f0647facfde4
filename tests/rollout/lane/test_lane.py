"""The lane between two threads of one process: order, back-pressure, leases, damage."""

from __future__ import annotations

import os
import socket
import threading
import time

import anyio
import anyio.to_thread
import numpy as np
import pytest
from lane_helpers import delivered, lane

from rollout.lane import slab
from rollout.lane.channel import Channel
from rollout.lane.control import Finish, Hello, LaneOpen, LearnerMessage, PublishNow, StepDone
from rollout.lane.errors import FrameDamaged, LaneFault, PeerGone
from rollout.lane.packing import rl_frames
from rollout.lane.ring import LaneReader, LaneWriter

pytestmark = pytest.mark.anyio


def small(step: int = 0, tokens: int = 8) -> object:
    return rl_frames([delivered(step, [tokens])], step=step)[0]


def read_steps(reader: LaneReader, num: int) -> list[int]:
    steps = []
    for _ in range(num):
        with reader.lease(5) as frame:
            steps.append(frame.meta.step)
    return steps


async def test_frames_arrive_in_order_and_bit_equal_over_many_wraps() -> None:
    async with lane(slots=2) as (writer, reader):
        async with anyio.create_task_group() as tasks:

            async def produce() -> None:
                for step in range(200):
                    await writer.write(small(step, tokens=1 + step % 30))

            tasks.start_soon(produce)
            steps = await anyio.to_thread.run_sync(read_steps, reader, 200)
        assert steps == list(range(200))
        assert writer.stats.num_frames == 200


async def test_a_full_lane_suspends_the_writer_and_leaves_the_loop_alone() -> None:
    async with lane(slots=2) as (writer, reader):
        for step in range(2):
            await writer.write(small(step))
        with anyio.move_on_after(0.2) as scope:
            await writer.write(small(2))
        assert scope.cancelled_caught
        assert writer.num_unread == 2
        assert read_steps(reader, 1) == [0]
        with anyio.fail_after(2):
            await writer.write(small(3))
        assert read_steps(reader, 2) == [1, 3], "the cancelled frame was never there"


async def test_packing_large_frames_stalls_the_loop_for_less_than_its_budget() -> None:
    parts = rl_frames([delivered(index, [2000] * 8) for index in range(20)], step=0)[0]
    async with lane(slots=2, slot_bytes=8 << 20) as (writer, reader):
        done = anyio.Event()

        async def write() -> None:
            await writer.write(parts)
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            lags = []
            while not done.is_set():
                began = time.perf_counter()
                await anyio.sleep(0.001)
                lags.append(time.perf_counter() - began - 0.001)
        typical_s = sorted(lags)[len(lags) // 2]
        with reader.lease(5) as frame:
            assert frame.counts.num_tokens == 320_000
        del frame
    assert len(lags) > 5, "the loop ran while the frame was packed"
    assert typical_s < 0.005


async def test_a_lost_wake_up_costs_at_most_the_recheck_period() -> None:
    async with lane() as (writer, reader):
        reading: list[int] = []
        thread = threading.Thread(target=lambda: reading.extend(read_steps(reader, 1)))
        thread.start()
        muted = os.eventfd(0, os.EFD_NONBLOCK)
        writer._ready, kept = muted, writer._ready
        await writer.write(small())
        began = time.monotonic()
        await anyio.to_thread.run_sync(thread.join)
        writer._ready = kept
        os.close(muted)
        assert reading == [0]
        assert time.monotonic() - began < 1.5


async def test_slots_may_be_given_back_out_of_order() -> None:
    async with lane(slots=2) as (writer, reader):
        await writer.write(small(0))
        await writer.write(small(1))
        first = reader.lease(5)
        assert first.__enter__().meta.step == 0
        assert read_steps(reader, 1) == [1]
        with anyio.fail_after(2):
            await writer.write(small(2))
        first.__exit__(None, None, None)
        assert read_steps(reader, 1) == [2]


async def test_a_view_that_outlives_its_lease_raises_and_its_memory_is_never_reused() -> None:
    engine, learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    async with LaneWriter(engine, slots=2, slot_bytes=1 << 16) as writer:
        reader = LaneReader(learner)
        await writer.write(small(0))
        with pytest.raises(BufferError):
            with reader.lease(5) as frame:
                kept = frame.token_ids[2:6]
        before = kept.copy()
        for step in range(1, 5):
            await writer.write(small(step))
            assert read_steps(reader, 1) == [step]
        assert np.array_equal(kept, before)
        with pytest.raises(BufferError):
            reader.close()
        assert kept.sum() == before.sum(), "the mapping is still there"


async def test_views_are_read_only_and_empty_after_the_lease() -> None:
    async with lane() as (writer, reader):
        await writer.write(small())
        with reader.lease(5) as frame:
            assert not frame.token_ids.flags.writeable
        assert len(frame.token_ids) == 0


async def test_a_frame_larger_than_a_slot_keeps_its_place_in_the_order() -> None:
    async with lane(slots=3, slot_bytes=4096) as (writer, reader):
        await writer.write(small(0))
        await writer.write(small(1, tokens=20_000))
        await writer.write(small(2))
        assert read_steps(reader, 3) == [0, 1, 2]
        await writer.write(small(3, tokens=30_000))
        with reader.lease(5) as frame:
            assert frame.token_ids.tolist() == delivered(3, [30_000]).group.trajectories[0].token_ids


async def test_damage_in_shared_memory_is_refused() -> None:
    async with lane() as (writer, reader):
        await writer.write(small())
        writer._view[slab.CONTROL_BYTES + 600] ^= 1
        with pytest.raises(FrameDamaged, match="sum"):
            with reader.lease(5):
                raise AssertionError("must not be handed out")


async def test_frames_come_before_the_messages_sent_after_them() -> None:
    async with lane() as (writer, reader):
        await writer.write(small())
        await writer.send(PublishNow())
        await writer.send(Finish())
        assert reader.wait(5) is None
        assert read_steps(reader, 1) == [0]
        assert reader.wait(5) == PublishNow()
        assert reader.wait(5) == Finish()
        with pytest.raises(TimeoutError):
            reader.wait(0.01)


async def test_messages_of_the_learner_arrive_and_then_its_end_is_known() -> None:
    async with lane() as (writer, reader):
        hello = Hello(phase_steps_sft=1, step=2, next_delivery_seq=3, weight_version=4)
        reader.send(hello)
        reader.send(StepDone(step=2, kind="rl", metrics={"loss": 0.5}))
        reader._channel.close()
        assert await writer.receive() == hello
        assert (await writer.receive()).metrics == {"loss": 0.5}
        with pytest.raises(PeerGone):
            await writer.receive()
        with pytest.raises(PeerGone):
            await writer.write(small())


async def test_a_suspended_writer_learns_of_its_peers_end() -> None:
    async with lane(slots=1) as (writer, reader):
        await writer.write(small(0))
        with anyio.fail_after(2):
            async with anyio.create_task_group() as tasks:

                async def blocked() -> None:
                    with pytest.raises(PeerGone):
                        await writer.write(small(1))

                tasks.start_soon(blocked)
                await anyio.wait_all_tasks_blocked()
                reader._channel.close()


async def test_the_end_of_the_engine_comes_after_the_last_frame() -> None:
    engine, learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    async with LaneWriter(engine, slots=2, slot_bytes=1 << 16) as writer:
        reader = LaneReader(learner)
        await writer.write(small(0))
    assert reader.wait(5) is None
    assert read_steps(reader, 1) == [0]
    with pytest.raises(PeerGone):
        reader.wait(5)
    reader.close()


async def test_another_version_of_the_lane_is_refused() -> None:
    engine, learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memfd = slab.create_memfd("test", 8192)
    channel: Channel[LearnerMessage] = Channel(engine, LearnerMessage)
    channel.send(LaneOpen(abi=99, num_slots=1, slot_bytes=4096, epoch=1), (memfd, memfd, memfd))
    with pytest.raises(LaneFault, match="version 99"):
        LaneReader(learner)
    channel.close()
    os.close(memfd)


async def test_unannounced_descriptors_are_closed_and_refused() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel: Channel[Finish] = Channel(other, Finish)
    before = len(os.listdir("/proc/self/fd"))
    socket.send_fds(one, [b'{"type":"Finish"}'], [1, 2])
    with pytest.raises(LaneFault, match="2 descriptors"):
        channel.receive()
    one.send(b"x" * 40_000)
    with pytest.raises(LaneFault, match="longer"):
        channel.receive()
    assert len(os.listdir("/proc/self/fd")) == before
    one.close()
    channel.close()


async def test_descriptors_stay_flat_over_many_frames() -> None:
    async with lane(slots=2, slot_bytes=4096) as (writer, reader):
        counts = []
        for _round in range(3):
            for step in range(20):
                await writer.write(small(step, tokens=10 if step % 2 else 5000))
                read_steps(reader, 1)
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1:] == counts[:1] * 2


async def test_more_memory_than_there_is_is_an_error_and_not_a_signal() -> None:
    engine, learner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with learner, pytest.raises(LaneFault, match="no shared memory"):
        async with LaneWriter(engine, slots=1, slot_bytes=1 << 60):
            raise AssertionError("must not open")


async def test_a_fill_that_fails_leaves_the_slot_free() -> None:
    async with lane(slots=1) as (writer, reader):
        broken = small()
        group = delivered(0, [4])
        broken = rl_frames([group], step=0)[0]
        group.group.trajectories[0].token_ids[0] = 1 << 40
        with pytest.raises(OverflowError):
            await writer.write(broken)
        await writer.write(small(5))
        assert read_steps(reader, 1) == [5]
