"""Reads a run directory's journal, without changing it; a live writer may be appending.

Invariant: records come in the order of writing; damage raises `JournalFault`, a torn tail ends
the iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

import msgspec

from rollout.errors import JournalFault
from rollout.journal.records import DeliveredRecord, GroupRecord, Record
from rollout.journal.segment import SegmentScan, TornTail, read_payload
from rollout.types import Group

_T = TypeVar("_T")
SEGMENT_GLOB = "[0-9]*.seg"


class Position(msgspec.Struct, frozen=True):
    """Where a record lies."""

    path: Path
    offset: int


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivered group; trajectory i has the delivery sequence number `seq_start + i`."""

    group: Group
    seq_start: int
    step: int


class JournalIndex(msgspec.Struct, kw_only=True):
    """What a writer or a resuming run needs to know of an existing journal."""

    next_group_id: int = 0
    next_delivery_seq: int = 0
    num_records: int = 0
    groups: dict[int, Position] = {}
    """Finished groups of training, by id."""
    deliveries: list[DeliveredRecord] = []
    torn: TornTail | None = None


class _GroupId(msgspec.Struct):
    group_id: int


class _GroupHead(msgspec.Struct, tag="group"):
    group: _GroupId
    purpose: str = "train"


class _DroppedHead(msgspec.Struct, tag="dropped"):
    dropped: _GroupId


class _Run(msgspec.Struct, tag="run"):
    pass


class _Eval(msgspec.Struct, tag="eval"):
    pass


class _Phase(msgspec.Struct, tag="phase"):
    pass


class _Weights(msgspec.Struct, tag="weights"):
    pass


class _Step(msgspec.Struct, tag="step"):
    pass


_Head: TypeAlias = _GroupHead | _DroppedHead | DeliveredRecord | _Run | _Eval | _Phase | _Weights | _Step
_DECODE = msgspec.msgpack.Decoder(Record)
_DECODE_HEAD = msgspec.msgpack.Decoder(_Head)
"""Skips the trajectories: an index of a large journal costs its reading and its checksums."""


def journal_dir(run_dir: Path) -> Path:
    """Where a run directory keeps its segments."""
    return run_dir / "journal"


def segments(run_dir: Path) -> list[Path]:
    """The segment files, oldest first."""
    return sorted(journal_dir(run_dir).glob(SEGMENT_GLOB))


def read_records(run_dir: Path | str) -> Iterator[Record]:
    """Every whole record, oldest first.

    Raises:
        JournalFault: damage; or a record that this version does not understand.
    """
    for scan in _scans(Path(run_dir)):
        for entry in scan:
            yield _decode(_DECODE, entry.payload, scan.path, entry.offset)


def index_journal(run_dir: Path | str) -> JournalIndex:
    """Reads the whole journal once and remembers where things are.

    Raises:
        JournalFault: damage.
    """
    index = JournalIndex(groups={}, deliveries=[])
    for scan in _scans(Path(run_dir)):
        for entry in scan:
            _note(index, _decode(_DECODE_HEAD, entry.payload, scan.path, entry.offset), scan.path, entry.offset)
        index.torn = scan.torn
    return index


def delivered_groups(
    run_dir: Path | str, from_seq: int = 0, *, index: JournalIndex | None = None
) -> Iterator[Delivery]:
    """Groups delivered at `from_seq` or later, in the order of delivery: what a resumed learner missed.

    `index` is the journal's, where the caller has it already.

    Raises:
        JournalFault: damage; or a delivery of a group that the journal does not hold.
    """
    index = index or index_journal(run_dir)
    for record in sorted(index.deliveries, key=lambda delivery: delivery.seq_start):
        if record.seq_end > from_seq:
            if record.group_id not in index.groups:
                raise JournalFault(f"group {record.group_id} was delivered and is not in the journal")
            group = read_group(index.groups[record.group_id])
            yield Delivery(group=group, seq_start=record.seq_start, step=record.step)


def undelivered_groups(run_dir: Path | str, *, index: JournalIndex | None = None) -> Iterator[Group]:
    """Finished training groups that were never delivered, oldest first: nothing finished is lost."""
    index = index or index_journal(run_dir)
    delivered = {record.group_id for record in index.deliveries}
    for group_id, position in index.groups.items():
        if group_id not in delivered:
            yield read_group(position)


def read_group(position: Position) -> Group:
    """The group at a position of the index."""
    payload = read_payload(position.path, position.offset)
    record = _decode(_DECODE, memoryview(payload), position.path, position.offset)
    assert isinstance(record, GroupRecord), record
    return record.group


def _scans(run_dir: Path) -> Iterator[SegmentScan]:
    paths = segments(run_dir)
    for path in paths:
        yield SegmentScan(path, last=path == paths[-1])


def _decode(decoder: msgspec.msgpack.Decoder[_T], payload: memoryview, path: Path, offset: int) -> _T:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise JournalFault(f"{path}: the record at byte {offset} cannot be understood: {error}") from error


def _note(index: JournalIndex, head: _Head, path: Path, offset: int) -> None:
    index.num_records += 1
    match head:
        case _GroupHead(group=group, purpose=purpose):
            index.next_group_id = max(index.next_group_id, group.group_id + 1)
            if purpose == "train":
                index.groups[group.group_id] = Position(path, offset)
        case _DroppedHead(dropped=dropped):
            index.next_group_id = max(index.next_group_id, dropped.group_id + 1)
        case DeliveredRecord():
            index.next_delivery_seq = max(index.next_delivery_seq, head.seq_end)
            index.deliveries.append(head)
        case _:
            pass
