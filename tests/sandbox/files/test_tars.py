"""Tars of hostile making end as one error that names its cause, at once, whatever they claim."""

from __future__ import annotations

import io
import random
import tarfile
import time

import pytest

from sandbox.errors import ConfigError
from sandbox.files import upload
from sandbox.files.caps import FullCaps
from sandbox.files.names import Names
from sandbox.files.upload import Tally, tar_records
from tests.sandbox.files.test_archive import member, tar_of

CAPS = FullCaps(1 << 20, 50)
NUM_BROKEN = 3000
BLOCK = tarfile.BLOCKSIZE


def sparse(**fields: str) -> bytes:
    return tar_of(member("s", b"999999\n" + b"1" * 505, pax_headers={f"GNU.sparse.{k}": v for k, v in fields.items()}))


def chain(num_headers: int) -> bytes:
    """Long names of long names of …"""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 10
    return (info.tobuf(tarfile.GNU_FORMAT) + b"abc".ljust(BLOCK, b"\0")) * num_headers


CRAFTED = {
    "endless sparse map": sparse(major="1", minor="0", name="s", realsize="999999999"),
    "sparse map of odd length": sparse(map="1,2,3", size="10"),
    "sparse map of words": sparse(map="a,b", size="10"),
    "chained long names": chain(3000),
    "size beyond all": tar_of(member("f", b"", pax_headers={"size": "9" * 20})),
    "size of a word": tar_of(member("f", b"abc", pax_headers={"size": "many", "mtime": "inf"}))[:BLOCK],
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("data", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_tar_is_refused_at_once(data: bytes) -> None:
    for content in (True, False):
        with pytest.raises(ConfigError):
            list(tar_records(io.BytesIO(data), CAPS, Tally(), content=content))


class Endless(io.RawIOBase):
    """The same bytes again and again, and no going back."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def read(self, size: int = -1) -> bytes:
        piece = (self._data * 2)[self._at : self._at + min(size, len(self._data))]
        self._at = (self._at + len(piece)) % len(self._data)
        return piece


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["./", "d/", "f"])
def test_a_member_that_comes_again_and_again_counts_each_time(name: str) -> None:
    again = Endless(member(name, b"" if name == "f" else None)[0].tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(ConfigError, match="more than 50 members"):
        list(tar_records(again, CAPS, Tally(), content=False))  # type: ignore[arg-type]


def test_a_batch_does_not_wait_for_bytes_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_BATCH_S", -1.0)
    assert list(upload.batched(iter((b"", b"ab", b"")))) == [b"", b"ab", b""]
    monkeypatch.setattr(upload, "_BATCH_S", 60.0)
    assert list(upload.batched(iter((b"", b"ab", b"c")))) == [b"abc"]


def broken(chance: random.Random, whole: bytes) -> bytes:
    """A few bytes changed, and the checksums made right again, so that the change counts."""
    data = bytearray(whole)
    for _ in range(chance.randrange(1, 8)):
        data[chance.randrange(len(data))] = chance.choice(
            (0, 0x80, 0xFF, 0x30, 0x39, 0x2F, 0x2E, chance.randrange(256))
        )
    for at in range(0, len(data) - BLOCK + 1, BLOCK):
        if data[at + 257 : at + 262] == b"ustar":
            if chance.random() < 0.3:
                data[at + 156] = chance.choice(b"\x0001234567LKSxgXNV")
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + BLOCK])
    return bytes(data)


def test_broken_tars_give_records_below_the_cap_or_one_error() -> None:
    chance = random.Random(1)
    formats = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
    members = (member("a", b"x" * 700), member("d", None), member("d/" + "n" * 90, b"y"))
    whole = [tar_of(*members, format=format) for format in formats]
    refused = 0
    for _ in range(NUM_BROKEN):
        tally = Tally()
        try:
            for _ in tar_records(io.BytesIO(broken(chance, chance.choice(whole))), CAPS, tally):
                continue
        except ConfigError:
            refused += 1
        assert tally.num_files + tally.num_directories <= CAPS.max_entries
    assert 0 < refused < NUM_BROKEN


def test_deep_names_cost_no_more_than_their_length() -> None:
    """Noting every directory above each of many deep names would take the engine half a minute."""
    names = Names(100_000)
    deep = "/".join("d" for _ in range(1900))
    began = time.process_time()
    for number in range(10_000):
        assert names.add(f"{deep}/{number}", "file") is None
    assert time.process_time() - began < 5
    assert names.add(f"{deep}/7/below", "file") == "it lies below a file"
    assert names.add(deep, "file") == "it is a file and a directory"
