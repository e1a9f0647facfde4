"""The records of a tree as a hostile sender may write them: a whole tar of plain names, or one fault."""

from __future__ import annotations

import errno
import io
import random
import tarfile
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.errors import TransferError
from sandbox.files.download import TarBuilder
from sandbox.files.reading import BLOCK_BYTES, END_OF_FILE
from sandbox.files.records import MAX_PATH_BYTES, Record, RecordKind, blocks, header
from sandbox.types import MIB, TarDownload

END = header(Record(RecordKind.END, ""))


def file(path: str, data: bytes = b"", claim: int | None = None) -> bytes:
    size = len(data) if claim is None else claim
    return header(Record(RecordKind.FILE, path, 0o644, 0, size, 7)) + b"".join(blocks(data)) + END_OF_FILE


def directory(path: str) -> bytes:
    return header(Record(RecordKind.DIRECTORY, path, 0o755))


def build(*parts: bytes, max_bytes: int = MIB, max_entries: int = 100) -> TarDownload:
    builder = TarBuilder("/w", max_bytes, max_entries)
    for part in parts:
        builder.feed(part)
    assert builder.finished
    return builder.result()


def members(data: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as tar:
        return tar.getmembers()


WHOLE = b"".join((directory("d"), file("d/f", b"abc" * 1000), file("e"), END))


@pytest.mark.parametrize("step", [1, 7, 31, 32, 33, 5000])
def test_it_does_not_matter_how_the_bytes_are_cut(step: int) -> None:
    pieces = [WHOLE[start : start + step] for start in range(0, len(WHOLE), step)]
    assert build(*pieces) == build(WHOLE)
    assert [member.name for member in members(build(*pieces).data)] == ["d", "d/f", "e"]


def test_a_file_that_became_shorter_is_as_long_as_what_came_of_it() -> None:
    download = build(directory("d"), file("d/" + "n" * 200, b"abc", claim=100_000), file("after", b"x"), END)
    assert [member.size for member in members(download.data)] == [0, 3, 1]


HOSTILE: dict[str, Sequence[bytes]] = {
    "absolute": (file("/etc/x"),),
    "climbing": (file("../x"),),
    "climbing later": (directory("a"), file("a/../../x")),
    "dot": (file("."),),
    "empty": (file(""),),
    "empty part": (file("a//b"),),
    "trailing": (directory("a/"),),
    "NUL": (file("a\0b"),),
    "file and directory": (file("a"), directory("a")),
    "below a file": (file("a"), file("a/b")),
    "long name": (file("n" * 256),),
    "more than it claims": (file("a", b"abc", claim=2),),
    "climbing, skipped": (header(Record(RecordKind.SKIPPED, "../x", 10)),),
    "NUL, skipped": (header(Record(RecordKind.SKIPPED, "a\0b", 10)),),
    "a link": (header(Record(RecordKind.LINK, "l", size=1)) + b"x",),
    "a seal": (header(Record(RecordKind.SEAL, "d")),),
    "after the end": (END + file("a"),),
    "no record": (bytes(32),),
    "long block": (header(Record(RecordKind.FILE, "a", size=MIB // 2)) + (BLOCK_BYTES + 1).to_bytes(4, "little"),),
    "long path": (file("n/" * (MAX_PATH_BYTES // 2) + "xx"),),
    "setuid": (header(Record(RecordKind.FILE, "a", 0o4755)),),
}


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE)
def test_what_no_honest_sender_writes_is_one_fault(parts: Sequence[bytes]) -> None:
    with pytest.raises(TransferError) as caught:
        build(*parts, END)
    assert caught.value.error == errno.EPROTO


@pytest.mark.parametrize(
    ("parts", "error", "path"),
    [
        ((file("big", b"", claim=MIB),), errno.EFBIG, "/w/big"),
        ((file("big", b"", claim=(1 << 64) - 1),), errno.EFBIG, "/w/big"),
        (tuple(directory(str(i)) for i in range(101)), errno.E2BIG, "/w/100"),
        (tuple(header(Record(RecordKind.SKIPPED, "x", 10)) for _ in range(101)), errno.E2BIG, "/w/x"),
        (tuple(header(Record(RecordKind.SKIPPED, f"{i}/" + "n" * 3990, 10)) for i in range(10, 99)), errno.EFBIG, None),
        ((header(Record(RecordKind.FAILED, "f", 0, errno.EIO)),), errno.EIO, "/w/f"),
    ],
)
def test_a_cap_holds_whatever_the_sender_thinks_of_it(parts: Sequence[bytes], error: int, path: str | None) -> None:
    with pytest.raises(TransferError) as caught:
        build(*parts, END, max_bytes=MIB // 4)
    assert (caught.value.error, path or caught.value.path) == (error, caught.value.path)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 6))
def test_broken_bytes_give_a_fault_or_a_tar_of_plain_names_below_its_cap(seed: int, changes: int) -> None:
    chance = random.Random(seed)
    data = bytearray(WHOLE)
    for _ in range(changes):
        data[chance.randrange(len(data))] = chance.randrange(256)
    builder = TarBuilder("/w", 20_000, 10)
    try:
        builder.feed(bytes(data))
    except TransferError:
        return
    if builder.finished:
        download = builder.result()
        assert len(download.data) <= 20_000
        for member in members(download.data):
            assert member.isreg() or member.isdir()
            assert not member.name.startswith("/")
            assert ".." not in member.name.split("/")
