"""The journal: durable, repaired after a torn write, honest about damage, exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import msgspec
import pytest
from engine_fakes import FaultySampler, collect, make_engine, make_task, scripted

from rollout.engine.evaluate import EvalTally
from rollout.errors import ConfigError, JournalFault, SamplerFault
from rollout.journal.reader import delivered_groups, index_journal, journal_dir, read_records, undelivered_groups
from rollout.journal.records import (
    DeliveredRecord,
    EvalRecord,
    GroupRecord,
    PhaseRecord,
    Record,
    RunHeader,
    WeightRecord,
)
from rollout.journal.segment import MAGIC, frame
from rollout.journal.writer import Journal
from rollout.types import DroppedGroup, Group

pytestmark = pytest.mark.anyio


async def groups(num: int, first: int = 0) -> list[Group]:
    found = await collect(
        make_engine(scripted("wrong", "oracle"), first_group_id=first), [make_task(max_turns=2)] * num
    )
    return sorted(found, key=lambda group: group.group_id)


async def write(run_dir: Path, records: list[Record], **options: int) -> None:
    async with Journal.open(run_dir, **options) as journal:
        for record in records:
            journal.append(record)


def segment_of(run_dir: Path, number: int = 1) -> Path:
    return journal_dir(run_dir) / f"{number:06d}.seg"


async def test_every_kind_of_record_comes_back_as_it_was(tmp_path: Path) -> None:
    group = (await groups(1))[0]
    report = EvalTally([make_task()], 2).report(name="before", temperature=1.0, weight_version=0, wall_s=0.1)
    records: list[Record] = [
        PhaseRecord(name="rl", event="begin", unix_s=1.0),
        GroupRecord(group=group),
        DeliveredRecord(group_id=0, seq_start=0, seq_end=2, step=0),
        WeightRecord(weight_version=2, step=1),
        EvalRecord(report=report),
    ]
    await write(tmp_path, records)
    header, *rest = read_records(tmp_path)
    assert isinstance(header, RunHeader)
    assert rest == records


async def test_the_turn_rewards_and_observations_of_a_conversation_are_in_the_journal(tmp_path: Path) -> None:
    async with Journal.open(tmp_path) as journal:
        engine = make_engine(scripted("wrong", "oracle"), journal=journal, group_size=1)
        await collect(engine, [make_task(max_turns=3)])
    (record,) = [record for record in read_records(tmp_path) if isinstance(record, GroupRecord)]
    (trajectory,) = record.group.trajectories
    assert trajectory.turn_rewards == (0.0, 1.0)
    assert trajectory.turns[0].observation == "it failed"
    assert trajectory.turns[0].visible is not None
    assert not trajectory.turns[0].visible.passed


async def test_a_group_is_on_the_disk_before_it_is_handed_out(tmp_path: Path) -> None:
    async with Journal.open(tmp_path) as journal:
        async with make_engine(journal=journal) as engine:
            async for group in engine.run([make_task(str(i)) for i in range(8)]):
                assert group.group_id in index_journal(tmp_path).groups


async def test_dropped_groups_and_evaluations_are_recorded_too(tmp_path: Path) -> None:
    async with Journal.open(tmp_path) as journal:
        sampler = FaultySampler(scripted("oracle"), lambda number: SamplerFault("down") if number < 6 else None)
        async with make_engine(sampler, journal=journal, min_fault_attempts=99) as engine:
            (dropped,) = [group async for group in engine.run([make_task()])]
            await engine.evaluate([make_task()], 2)
    kinds = [type(record).__name__ for record in read_records(tmp_path)]
    assert isinstance(dropped, DroppedGroup)
    assert kinds == ["RunHeader", "DroppedRecord", "GroupRecord", "EvalRecord"]
    assert list(undelivered_groups(tmp_path)) == []


async def test_a_torn_tail_of_any_length_is_cut_off_and_reported(tmp_path: Path) -> None:
    found = await groups(3)
    await write(tmp_path, [GroupRecord(group=group) for group in found])
    whole = segment_of(tmp_path).read_bytes()
    size = len(frame(b""))
    last = len(whole) - len(frame(_encode(GroupRecord(group=found[2]))))
    for length in (last + 1, last + size - 1, last + size, last + size + 1, len(whole) - 1):
        segment_of(tmp_path).write_bytes(whole[:length])
        assert len(list(read_records(tmp_path))) == 3
        async with Journal.open(tmp_path) as journal:
            assert journal.repaired is not None
            assert (journal.repaired.offset, journal.repaired.num_bytes) == (last, length - last)
            journal.append(GroupRecord(group=found[2]))
        assert len(list(read_records(tmp_path))) == 5


async def test_a_segment_that_died_before_its_magic_is_repaired(tmp_path: Path) -> None:
    await write(tmp_path, [])
    segment_of(tmp_path).write_bytes(MAGIC[:3])
    await write(tmp_path, [])
    assert [type(record) for record in read_records(tmp_path)] == [RunHeader]


async def test_a_flipped_bit_anywhere_is_detected_and_never_repaired(tmp_path: Path) -> None:
    await write(tmp_path, [GroupRecord(group=group) for group in await groups(2)])
    whole = segment_of(tmp_path).read_bytes()
    last = len(whole) - len(frame(_encode(list(read_records(tmp_path))[-1])))
    for position in [*range(0, 40), *range(40, last, 97), *range(last, last + 8), *range(last + 8, len(whole), 97)]:
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        segment_of(tmp_path).write_bytes(damaged)
        with pytest.raises(JournalFault):
            list(read_records(tmp_path))
    segment_of(tmp_path).write_bytes(damaged)
    with pytest.raises(JournalFault):
        await write(tmp_path, [])
    assert segment_of(tmp_path).read_bytes() == damaged


async def test_segments_roll_over_and_are_read_in_order(tmp_path: Path) -> None:
    async with Journal.open(tmp_path, segment_bytes=1_000) as journal:
        for version in range(200):
            journal.append(WeightRecord(weight_version=version, step=0))
            await journal.flush()
    assert len(list(journal_dir(tmp_path).glob("*.seg"))) > 3
    versions = [record.weight_version for record in read_records(tmp_path) if isinstance(record, WeightRecord)]
    assert versions == list(range(200))


async def test_a_torn_record_in_an_older_segment_is_damage(tmp_path: Path) -> None:
    async with Journal.open(tmp_path, segment_bytes=200) as journal:
        for version in range(50):
            journal.append(WeightRecord(weight_version=version, step=0))
            await journal.flush()
    first = segment_of(tmp_path)
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalFault, match="damaged"):
        list(read_records(tmp_path))


async def test_one_sync_serves_many_who_wait(tmp_path: Path) -> None:
    async with Journal.open(tmp_path) as journal:
        before = journal.num_commits

        async def append(version: int) -> None:
            journal.append(WeightRecord(weight_version=version, step=0))
            await journal.flush()

        async with anyio.create_task_group() as tasks:
            for version in range(200):
                tasks.start_soon(append, version)
        assert journal.num_commits - before <= 3
    assert len(list(read_records(tmp_path))) == 201


async def test_a_cancelled_flush_loses_and_doubles_nothing(tmp_path: Path) -> None:
    async with Journal.open(tmp_path) as journal:
        for version in range(30):
            journal.append(WeightRecord(weight_version=version, step=0))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(journal.flush)
                if version % 2:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
    versions = [record.weight_version for record in read_records(tmp_path) if isinstance(record, WeightRecord)]
    assert versions == list(range(30))


async def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    async with Journal.open(tmp_path):
        with pytest.raises(ConfigError, match="another process"):
            await write(tmp_path, [])


async def test_a_full_disk_is_a_fault_and_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    full = True

    def limited_write(descriptor: int, data: memoryview) -> int:
        if not full or len(data) < 20:
            return real_write(descriptor, data)
        real_write(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    async with Journal.open(tmp_path) as journal:
        monkeypatch.setattr(os, "write", limited_write)
        journal.append(WeightRecord(weight_version=1, step=0))
        with pytest.raises(JournalFault, match="No space left"):
            await journal.flush()
        assert len(list(read_records(tmp_path))) == 1
        full = False
    assert len(list(read_records(tmp_path))) == 2


async def test_deliveries_are_numbered_without_gaps_and_go_on_after_a_restart(tmp_path: Path) -> None:
    found = await groups(4)
    async with Journal.open(tmp_path) as journal:
        for group in found[:3]:
            journal.append(GroupRecord(group=group))
        assert [journal.deliver(group, step=0) for group in found[:2]] == [0, 2]
    async with Journal.open(tmp_path) as journal:
        assert (journal.next_delivery_seq, journal.next_group_id) == (4, 3)
        journal.append(GroupRecord(group=found[3]))
        assert journal.deliver(found[3], step=1) == 4
    assert [d.seq_start for d in delivered_groups(tmp_path)] == [0, 2, 4]
    again = list(delivered_groups(tmp_path, from_seq=3))
    assert [(d.seq_start, d.step, d.group) for d in again] == [(2, 0, found[1]), (4, 1, found[3])]
    assert list(undelivered_groups(tmp_path)) == [found[2]]


WRITER = """
import sys, anyio
from pathlib import Path
from rollout.journal.writer import Journal
from rollout.journal.records import WeightRecord

async def main():
    async with Journal.open(Path(sys.argv[1])) as journal:
        for version in range(10**6):
            journal.append(WeightRecord(weight_version=version, step=0))
            await journal.flush()
            print(version, flush=True)

anyio.run(main)
"""


def test_what_a_killed_writer_had_flushed_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    for _ in range(3):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if int(line) == 50:
                    process.send_signal(signal.SIGKILL)
                    break
            flushed = [50, *map(int, process.stdout.read().split())][-1]
        versions = [record.weight_version for record in read_records(tmp_path) if isinstance(record, WeightRecord)]
        last_run = versions[len(versions) - 1 - versions[::-1].index(0) :]
        assert last_run[: flushed + 1] == list(range(flushed + 1))


def _encode(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)
