"""Trees of hostile making: whatever bytes come, a download is a plain tar within its caps, or a fault."""

from __future__ import annotations

import io
import random
import struct
import tarfile

import pytest

from sandbox.errors import TransferError
from sandbox.files.download import TarBuilder
from sandbox.files.reading import END_OF_FILE
from sandbox.files.records import Record, RecordKind, blocks, header
from tests.sandbox.protocol.fuzzing import scaled, seed

pytestmark = pytest.mark.timeout(3600 if scaled(1) > 1 else 120)
MAX_BYTES = 64 * 1024
MAX_ENTRIES = 8
PATHS = (
    "a",
    "a/b",
    "a/b/c",
    "",
    ".",
    "..",
    "a/../b",
    "/a",
    "a//b",
    "a/",
    "\0",
    "a\0b",
    "x" * 300,
    "y/" * 1900,
    "\udcff",
)
NUMBERS = (0, 1, 5, 4095, 4096, 0xFFFF, 1 << 31, (1 << 32) - 1)
SIZES = (0, 1, 3, 512, MAX_BYTES, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
TIMES = (0, -1, 1 << 33, 1 << 40, (1 << 63) - 1, -(1 << 63))


def stream_of(chance: random.Random) -> bytes:
    """Records in any order, most of them whole, some bytes then changed, cut or doubled."""
    parts = []
    for _ in range(chance.randrange(6)):
        kind = chance.choice((RecordKind.FILE, RecordKind.FILE, RecordKind.DIRECTORY, chance.choice(list(RecordKind))))
        size = chance.choice(SIZES)
        mode = chance.choice((0o644, 0o755, 0o777, 0o4755, 0xFFFF))
        record = Record(kind, chance.choice(PATHS), mode, chance.choice(NUMBERS), size, chance.choice(TIMES))
        if chance.random() < 0.7:
            record = record._replace(path=f"f{chance.randrange(4)}", mode=0o644, size=min(size, 700), error=0)
        parts.append(header(record))
        if record.kind is RecordKind.FILE:
            content = bytes(min(record.size, 700))
            parts += [*blocks(content), END_OF_FILE]
    parts.append(header(Record(RecordKind.END, "")))
    data = bytearray(b"".join(parts))
    match chance.randrange(5):
        case 0:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 1:
            del data[chance.randrange(len(data)) :]
        case 2:
            at = chance.randrange(len(data))
            data[at : at + 4] = struct.pack("<I", chance.choice(NUMBERS))
        case 3 if len(parts) > 1:
            data += chance.choice(parts)
        case _:
            pass
    return bytes(data)


def check_tar(data: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        members = tar.getmembers()
    assert len(data) <= MAX_BYTES
    assert len(members) <= MAX_ENTRIES
    for member in members:
        assert member.isreg() or member.isdir()
        assert not member.name.startswith("/")
        assert not {"", ".", ".."} & set(member.name.split("/"))
        assert member.mode <= 0o777


def test_records_of_hostile_making_give_a_plain_tar_or_a_fault() -> None:
    chance = random.Random(seed())
    whole = 0
    for number in range(scaled(10_000)):
        data = stream_of(chance)
        builder = TarBuilder("/workspace", MAX_BYTES, MAX_ENTRIES)
        try:
            while data:
                size = chance.choice((1, 31, 32, 100, len(data)))
                builder.feed(data[:size])
                data = data[size:]
            if builder.finished:
                check_tar(builder.result().data)
                whole += 1
        except TransferError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed()}, stream {number}: {error!r}") from error
    assert whole > scaled(500)
