"""The frame: a packed columnar batch of complete groups, and how it lies in memory.

Owns the columns, their dtypes and order, the header and the checksums. Invariant: everything in a
frame is found through its header and directory, every column starts on a 64-byte boundary, and
`open_frame` returns views only after the header's checksum, the payload's sum and all sizes agreed.

Layout: header (128 B) · directory (24 B a column) · columns · metadata (one msgspec blob).
Shapes: T tokens over all sequences, S sequences, N trajectories, V version spans.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout.lane.errors import FrameDamaged

ALIGNMENT_BYTES = 64
ABI = 1
"""Version of everything in this file and in `slab`; both ends must agree."""
MAX_META_BYTES = 4096
_MAGIC = 0x454D41524652_4C52
_HEADER = struct.Struct("<QIIQQQQQIIIII")
_HEADER_BYTES = 128
_ENTRY = struct.Struct("<HHIQQ")
_CRC = struct.Struct("<I")


class FrameMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the columns cannot say."""

    kind: Literal["sft", "rl"]
    step: int
    """Index of the optimizer step that this frame belongs to, counted per kind from 0."""
    last_of_step: bool
    """No more frames of this step follow."""


class FrameCounts(NamedTuple):
    """How long the columns are."""

    num_tokens: int
    num_sequences: int
    num_trajectories: int
    num_spans: int


class _Column(NamedTuple):
    name: str
    dtype: str
    length: Callable[[FrameCounts], int]


def _tokens(counts: FrameCounts) -> int:
    return counts.num_tokens


def _trajectories(counts: FrameCounts) -> int:
    return counts.num_trajectories


COLUMNS: tuple[_Column, ...] = (
    _Column("token_ids", "<i4", _tokens),
    _Column("loss_mask", "|u1", _tokens),
    _Column("logprobs", "<f4", _tokens),
    _Column("cu_seqlens", "<i4", lambda counts: counts.num_sequences + 1),
    _Column("seq_traj", "<i4", lambda counts: counts.num_sequences),
    _Column("rewards", "<f4", _trajectories),
    _Column("advantages", "<f4", _trajectories),
    _Column("traj_valid", "|u1", _trajectories),
    _Column("stop_reason", "|u1", _trajectories),
    _Column("group_id", "<i8", _trajectories),
    _Column("group_n", "<u2", _trajectories),
    _Column("delivery_seq", "<i8", _trajectories),
    _Column("temperature", "<f4", _trajectories),
    _Column("spans", "<i8", lambda counts: 4 * counts.num_spans),
)
"""A column's wire id is its place here; append only, and raise `ABI`."""

_DIRECTORY_END = _HEADER_BYTES + -(-_ENTRY.size * len(COLUMNS) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class Frame:
    """Views of one frame's columns. `release` drops them, so that the memory can be reused."""

    meta: FrameMeta
    seq: int
    """Place of the frame in its lane, counted from 0."""
    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T] 1 on tokens that were sampled (RL) or are to be imitated (SFT)."""
    logprobs: NDArray[np.float32]
    """[T] behaviour log-probabilities in nats, after temperature; 0 where `loss_mask` is 0."""
    cu_seqlens: NDArray[np.int32]
    """[S+1] sequence s holds tokens cu_seqlens[s] … cu_seqlens[s+1]."""
    seq_traj: NDArray[np.int32]
    """[S] trajectory of each sequence, an index into this frame."""
    rewards: NDArray[np.float32]
    """[N] 0 where `traj_valid` is 0."""
    advantages: NDArray[np.float32]
    """[N]"""
    traj_valid: NDArray[np.uint8]
    """[N] 0 where the reward is unknown through a fault of ours: not to be trained on."""
    stop_reason: NDArray[np.uint8]
    """[N] codes of `rollout.types.STOP_REASON_CODES`."""
    group_id: NDArray[np.int64]
    """[N] -1 in SFT frames."""
    group_n: NDArray[np.uint16]
    """[N] size of the trajectory's group."""
    delivery_seq: NDArray[np.int64]
    """[N] the journal's global number of this delivery; -1 in SFT frames."""
    temperature: NDArray[np.float32]
    """[N]"""
    spans: NDArray[np.int64]
    """[V*4] rows of (trajectory, start, end, weight_version)."""

    @property
    def counts(self) -> FrameCounts:
        """How long the columns are."""
        return FrameCounts(len(self.token_ids), len(self.seq_traj), len(self.rewards), len(self.spans) // 4)

    def release(self) -> bool:
        """Forgets every view; the frame is empty afterwards. False when somebody else still holds one.

        Every slice, tensor or memoryview of a column keeps the column's array alive, and only the frame
        held the array itself: an array that survives is a view in use.
        """
        watched = [weakref.ref(getattr(self, column.name)) for column in COLUMNS]
        for column in COLUMNS:
            setattr(self, column.name, np.empty(0, column.dtype))
        return all(reference() is None for reference in watched)


@dataclass(frozen=True, slots=True)
class FrameParts:
    """A frame that is still to be written: its sizes, and how to fill it.

    `fill` writes every column into the given views in small pieces, yielding between them, so
    that a writer in a thread can let the event loop run.
    """

    meta: FrameMeta
    counts: FrameCounts
    fill: Callable[[Frame], Iterator[None]]

    @property
    def nbytes(self) -> int:
        """Bytes that the whole frame takes, header included."""
        return _Layout.plan(self.counts, len(msgspec.msgpack.encode(self.meta))).nbytes


class _Layout(NamedTuple):
    counts: FrameCounts
    offsets: tuple[int, ...]
    meta_offset: int
    meta_nbytes: int
    nbytes: int

    @staticmethod
    def plan(counts: FrameCounts, meta_nbytes: int) -> _Layout:
        """The one place where offsets are decided; the reader only compares against it."""
        offsets = []
        end = _DIRECTORY_END
        for column in COLUMNS:
            offsets.append(end)
            end += _align(column.length(counts) * np.dtype(column.dtype).itemsize)
        return _Layout(counts, tuple(offsets), end, meta_nbytes, end + _align(meta_nbytes))

    def views(self, view: memoryview) -> dict[str, NDArray[Any]]:
        return {
            column.name: np.frombuffer(view, column.dtype, column.length(self.counts), offset)
            for column, offset in zip(COLUMNS, self.offsets, strict=True)
        }

    def directory(self) -> bytes:
        entries = b"".join(
            _ENTRY.pack(index, _dtype_code(column.dtype), 0, offset, self._column_nbytes(column))
            for index, (column, offset) in enumerate(zip(COLUMNS, self.offsets, strict=True))
        )
        return entries.ljust(_DIRECTORY_END - _HEADER_BYTES, b"\0")

    def _column_nbytes(self, column: _Column) -> int:
        return column.length(self.counts) * np.dtype(column.dtype).itemsize


def write_frame(view: memoryview, parts: FrameParts, *, generation: int, seq: int) -> Iterator[None]:
    """Fills `view` with a whole frame, yielding between pieces; the frame is valid after the last.

    Args:
        view: writable, at least `parts.nbytes` long, starting on a 64-byte boundary.
        generation: how often this memory has been used; a reader refuses another one.
        seq: place of the frame in its lane.
    """
    meta = msgspec.msgpack.encode(parts.meta)
    layout = _Layout.plan(parts.counts, len(meta))
    frame = Frame(meta=parts.meta, seq=seq, **layout.views(view))
    try:
        yield from parts.fill(frame)
    finally:
        frame.release()
    view[layout.meta_offset : layout.meta_offset + len(meta)] = meta
    total = sum64(view[_DIRECTORY_END : layout.nbytes])
    directory = layout.directory()
    header = _HEADER.pack(
        _MAGIC, ABI, len(COLUMNS), generation, seq, layout.nbytes, total,
        layout.meta_offset, *layout.counts, layout.meta_nbytes,
    )  # fmt: skip
    view[:_DIRECTORY_END] = _with_crc(header, directory) + directory
    yield


def open_frame(view: memoryview, *, generation: int, seq: int) -> Frame:
    """Checks a frame and returns views of its columns; they keep `view` exported.

    Raises:
        FrameDamaged: magic, version, order, sizes or checksums are wrong.
    """
    if len(view) < _DIRECTORY_END:
        raise FrameDamaged(f"a frame of {len(view)} bytes is shorter than its header")
    magic, abi, num_columns, found_generation, found_seq, nbytes, total, meta_offset, *counts, meta_nbytes = (
        _HEADER.unpack_from(view)
    )
    if magic != _MAGIC or abi != ABI or num_columns != len(COLUMNS):
        raise FrameDamaged(f"not a frame of this version: magic {magic:#x}, abi {abi}, {num_columns} columns")
    header, directory = bytes(view[: _HEADER.size]), bytes(view[_HEADER_BYTES:_DIRECTORY_END])
    if bytes(view[:_HEADER_BYTES]) != _with_crc(header, directory):
        raise FrameDamaged("the header does not match its checksum")
    if (found_generation, found_seq) != (generation, seq):
        raise FrameDamaged(f"frame {found_seq} of generation {found_generation} where {seq} of {generation} was due")
    layout = _Layout.plan(FrameCounts(*counts), meta_nbytes)
    sizes_agree = layout.nbytes == nbytes <= len(view) and layout.meta_offset == meta_offset
    if not sizes_agree or directory != layout.directory() or meta_nbytes > MAX_META_BYTES:
        raise FrameDamaged("the directory does not describe the columns of this version")
    if sum64(view[_DIRECTORY_END:nbytes]) != total:
        raise FrameDamaged("the payload does not match its sum")
    try:
        meta = msgspec.msgpack.decode(view[meta_offset : meta_offset + meta_nbytes], type=FrameMeta)
    except msgspec.MsgspecError as error:
        raise FrameDamaged(f"metadata: {error}") from error
    return Frame(meta=meta, seq=seq, **layout.views(view))


def sum64(view: memoryview) -> int:
    """Sum of the 8-byte words of `view`, modulo 2^64: 24 GB/s, and any single flipped bit changes it.

    `view` is a multiple of 8 bytes long.
    """
    return int(np.frombuffer(view, np.uint64).sum(dtype=np.uint64))


def _with_crc(header: bytes, directory: bytes) -> bytes:
    crc = _CRC.pack(zlib.crc32(directory, zlib.crc32(header)))
    return (header + crc).ljust(_HEADER_BYTES, b"\0")


def _dtype_code(dtype: str) -> int:
    return ord(np.dtype(dtype).kind) << 8 | np.dtype(dtype).itemsize


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


assert {column.name for column in COLUMNS} <= {field.name for field in fields(Frame)}
