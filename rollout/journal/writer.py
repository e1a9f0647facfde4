"""The journal's writer: appends records and makes them durable in groups.

Owns the newest segment file and the run directory's lock. Invariants: after `flush` returns,
everything appended before the call survives `kill -9` and power loss; one `fsync` serves all who
wait for it; only one process writes at a time; a failed write leaves no half record behind.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from rollout.errors import ConfigError, JournalFault
from rollout.journal.reader import JournalIndex, index_journal, journal_dir, segments
from rollout.journal.records import DeliveredRecord, Record, RunHeader
from rollout.journal.segment import MAGIC, TornTail, frame
from rollout.types import Group

SEGMENT_BYTES = 64 * 1024 * 1024
"""A new segment begins once the current one is longer."""
MAX_PENDING_BYTES = 1 << 30
_CLOSE_TIMEOUT_S = 30.0


class Journal:
    """The open journal of one run directory; made by `Journal.open`."""

    def __init__(self, run_dir: Path, index: JournalIndex, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.run_dir = run_dir
        self.next_group_id = index.next_group_id
        self.next_delivery_seq = index.next_delivery_seq
        self.repaired: TornTail | None = index.torn
        """The torn record that opening cut off; None when the journal ended cleanly."""
        self.num_commits = 0
        self._segment_bytes = segment_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._num_appended = 0
        self._num_durable = 0
        self._commit = anyio.Lock()
        self._path: Path | None = None
        self._file = -1
        self._size = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls, run_dir: Path | str, *, command: str = "", config_json: str = "", segment_bytes: int = SEGMENT_BYTES
    ) -> AsyncIterator[Journal]:
        """Opens, repairs and locks the journal of `run_dir`, which is made if it is missing.

        Appends a `RunHeader`. Leaving flushes what is pending.

        Raises:
            ConfigError: another process is writing there.
            JournalFault: damage, or the directory cannot be written.
        """
        path = Path(run_dir)
        lock = await anyio.to_thread.run_sync(_lock, journal_dir(path))
        try:
            index = await anyio.to_thread.run_sync(index_journal, path)
            journal = cls(path, index, segment_bytes=segment_bytes)
            await anyio.to_thread.run_sync(journal._open_segment)
            try:
                header = RunHeader(started_unix_s=time.time(), command=command, config_json=config_json)
                journal.append(header)
                await journal.flush()
                yield journal
            finally:
                with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                    await journal._close()
        finally:
            os.close(lock)

    def append(self, record: Record) -> None:
        """Queues a record; it is durable after the next `flush`.

        Raises:
            JournalFault: it is too large, or gigabytes wait to be flushed.
        """
        framed = frame(self._encoder.encode(record))
        if self._pending_bytes + len(framed) > MAX_PENDING_BYTES:
            raise JournalFault(f"{self._pending_bytes} bytes wait to be written: call flush")
        self._pending.append(framed)
        self._pending_bytes += len(framed)
        self._num_appended += 1

    def deliver(self, group: Group, step: int) -> int:
        """Gives a group its place in the stream to the learner and queues the record of it.

        Flush before the group is sent. Returns the delivery sequence number of its first
        trajectory; the others follow in sibling order.
        """
        start = self.next_delivery_seq
        self.next_delivery_seq = start + len(group.trajectories)
        self.append(
            DeliveredRecord(group_id=group.group_id, seq_start=start, seq_end=self.next_delivery_seq, step=step)
        )
        return start

    async def flush(self) -> None:
        """Returns once everything appended before is on the disk.

        Raises:
            JournalFault: it cannot be written; what was appended stays queued.
        """
        target = self._num_appended
        async with self._commit:
            if self._num_durable >= target:
                return
            batch = tuple(self._pending)
            # The thread is waited for even when this task is cancelled, so the books stay right.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._write, batch)
            del self._pending[: len(batch)]
            self._pending_bytes -= sum(map(len, batch))
            self._num_durable += len(batch)
            self.num_commits += 1

    async def _close(self) -> None:
        try:
            await self.flush()
        finally:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _open_segment(self) -> None:
        """Opens the newest segment at the end of its last whole record (in a worker thread)."""
        existing = segments(self.run_dir)
        if not existing:
            self._new_segment(1)
            return
        self._path = existing[-1]
        if self.repaired is not None:
            sys.stderr.write(
                f"journal: cut off a torn record ({self.repaired.num_bytes} bytes) at the end of {self._path}\n"
            )
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            if self.repaired is not None:
                os.ftruncate(self._file, self.repaired.offset)
            self._size = os.fstat(self._file).st_size
            if self._size < len(MAGIC):
                self._append_bytes(MAGIC[self._size :])
            os.fsync(self._file)
        except OSError as error:
            raise JournalFault(f"opening {self._path}: {error}") from error

    def _new_segment(self, number: int) -> None:
        folder = journal_dir(self.run_dir)
        self._path = folder / f"{number:06d}.seg"
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            if self._file >= 0:
                os.close(self._file)
            self._file, self._size = file, 0
            self._append_bytes(MAGIC)
            os.fsync(file)
            _fsync_dir(folder)
        except OSError as error:
            raise JournalFault(f"making {self._path}: {error}") from error

    def _write(self, batch: tuple[bytes, ...]) -> None:
        """Appends and syncs; on failure the file is cut back to its whole records (worker thread)."""
        assert self._path is not None
        if self._size >= self._segment_bytes:
            self._new_segment(int(self._path.stem) + 1)
        start = self._size
        try:
            self._append_bytes(b"".join(batch))
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, start)
            self._size = start
            raise JournalFault(f"writing {self._path}: {error}") from error

    def _append_bytes(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._file, view)
            view = view[written:]
            self._size += written


def _lock(folder: Path) -> int:
    """An exclusive lock on the journal, held as long as the descriptor is open."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise JournalFault(f"opening the run directory {folder.parent}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigError("run_dir", str(folder.parent), "another process is writing to it") from error
    return lock


def _fsync_dir(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
