"""The stream of a workspace is believed only as far as it can be checked."""

from __future__ import annotations

import random

import pytest

from sandbox.errors import LayerError, ProtocolError
from sandbox.files.caps import FullCaps
from sandbox.files.reading import END_OF_FILE, LENGTH
from sandbox.files.records import blocks
from sandbox.layers.intake import Intake
from sandbox.layers.records import Record, RecordKind, RecordReader, encode

CAPS = FullCaps(1000, 20)
ROOT = encode(Record(RecordKind.DIRECTORY, b"", 0o755))
END = encode(Record(RecordKind.END, b""))


def file(path: bytes, data: bytes, mode: int = 0o644) -> bytes:
    return encode(Record(RecordKind.FILE, path, mode, size=len(data))) + b"".join(blocks(data)) + END_OF_FILE


def directory(path: bytes, *, opaque: bool = False) -> bytes:
    return encode(Record(RecordKind.DIRECTORY, path, 0o700, opaque))


GOOD = [
    ROOT,
    directory(b"d", opaque=True),
    file(b"d/f", b"hello"),
    encode(Record(RecordKind.LINK, b"l", target=b"/etc")),
    encode(Record(RecordKind.DELETED, b"gone")),
    encode(Record(RecordKind.SPECIAL, b"p", 1)),
    END,
]


def test_pieces_of_any_size_give_the_same() -> None:
    stream = b"".join(GOOD)
    results = []
    for size in (1, 7, 100, len(stream)):
        intake = Intake(CAPS, None)
        for start in range(0, len(stream), size):
            intake.feed(stream[start : start + size])
        results.append(intake.result())
    assert all(result == results[0] for result in results)
    delta = results[0]
    assert sorted(delta.nodes) == [b"", b"d", b"d/f", b"l"]
    assert delta.nodes[b"d"].opaque
    assert delta.nodes[b"d/f"].size == 5
    assert delta.deleted == {b"gone"}
    assert delta.special == {b"p": "fifo"}


BAD = {
    "no root": file(b"f", b""),
    "root twice": ROOT + ROOT,
    "root as a file": file(b"", b""),
    "root after others": ROOT + directory(b"d") + directory(b""),
    "up": ROOT + file(b"..", b""),
    "here": ROOT + directory(b"."),
    "inner up": ROOT + directory(b"d") + file(b"d/..", b""),
    "absolute": ROOT + file(b"/f", b""),
    "slash at the end": ROOT + directory(b"d/"),
    "two slashes": ROOT + directory(b"d") + file(b"d//f", b""),
    "no parent": ROOT + file(b"d/f", b""),
    "below a file": ROOT + file(b"f", b"") + file(b"f/g", b""),
    "below a link": ROOT + encode(Record(RecordKind.LINK, b"l", target=b"/")) + file(b"l/etc", b""),
    "below a deletion": ROOT + encode(Record(RecordKind.DELETED, b"d")) + file(b"d/f", b""),
    "twice": ROOT + file(b"f", b"") + file(b"f", b""),
    "NUL": ROOT + file(b"f\0g", b""),
    "long name": ROOT + file(b"n" * 256, b""),
    "empty link": ROOT + encode(Record(RecordKind.LINK, b"l", target=b"")),
    "NUL in a link": ROOT + encode(Record(RecordKind.LINK, b"l", target=b"a\0b")),
    "set-user-id": ROOT + file(b"f", b"", 0o4755),
    "opaque file": ROOT + file(b"f", b"", 0o100000),
    "nanoseconds": ROOT + encode(Record(RecordKind.FILE, b"f", mtime_ns=0))[:12] + b"\xff" * 20 + b"f",
    "more than claimed": ROOT + encode(Record(RecordKind.FILE, b"f", size=3)) + LENGTH.pack(4) + b"1234",
    "large block": ROOT + encode(Record(RecordKind.FILE, b"f", size=1 << 40)) + LENGTH.pack(1 << 20),
    "after the end": ROOT + END + ROOT,
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("stream", BAD.values(), ids=BAD)
def test_what_cannot_be_is_refused(stream: bytes) -> None:
    intake = Intake(FullCaps(1 << 50, 100), None)
    with pytest.raises(LayerError):
        intake.feed(stream)


def test_an_early_end_is_no_layer() -> None:
    for stream in (b"", ROOT, END, b"".join(GOOD)[:-5]):
        intake = Intake(CAPS, None)
        intake.feed(stream)
        with pytest.raises(LayerError, match="ends too early"):
            intake.result()


def test_caps_hold_whatever_the_sender_says() -> None:
    for stream, words in (
        (file(b"f", b"1" * 1001), "max_bytes"),
        (b"".join(file(b"%d" % n, b"") for n in range(21)), "max_entries"),
    ):
        with pytest.raises(LayerError, match=words):
            Intake(CAPS, None).feed(ROOT + stream)


def test_damaged_streams_end_as_one_error_and_give_only_names_inside() -> None:
    rng, good = random.Random(3), b"".join(GOOD)
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 1, 255, 46, 47, rng.randrange(256)))
        reader = RecordReader()
        try:
            for event in reader.take(bytes(data)):
                if isinstance(event, Record) and event.kind is not RecordKind.FAILED:
                    assert b".." not in event.path.split(b"/")
                    assert not event.path.startswith(b"/")
        except ProtocolError:
            refused += 1
    assert 1000 < refused < 3000
