"""The wire format: what one side writes the other reads, and nothing malformed gets through."""

from __future__ import annotations

import random
import socket
import struct
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.build import ensure_native
from sandbox.errors import ProtocolError
from sandbox.protocol.wire import MAX_FRAME_BYTES, Kind, Tag, decode, encode, number, numbered, text

FRAME = encode(Kind.START, 7, [text(Tag.ARGV, "a", "b"), number(Tag.IDS, 1, 2), numbered(Tag.OPEN, 4, "/x")])


def test_a_frame_is_read_back_as_it_was_written() -> None:
    frame = decode(FRAME)
    assert (frame.kind, frame.ident) == (Kind.START, 7)
    assert frame.items[0] == (Tag.ARGV, b"a\0b\0")
    assert frame.value(Tag.OPEN) == b"\x04\0\0\0/x\0"
    assert frame.value(Tag.TEXT) is None


def test_a_frame_that_is_too_long_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        encode(Kind.RUN, 1, [(Tag.ARGV, b"x" * MAX_FRAME_BYTES)])


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, len(FRAME)), st.booleans())
def test_bytes_that_are_no_frame_raise_protocol_error_and_nothing_else(junk: bytes, cut: int, keep: bool) -> None:
    data = FRAME[:cut] + junk + (FRAME[cut:] if keep else b"")
    try:
        frame = decode(data)
    except ProtocolError:
        return
    assert sum(8 + len(value) for _, value in frame.items) == len(data) - 16


def test_every_truncation_of_a_frame_is_refused() -> None:
    for length in range(len(FRAME)):
        with pytest.raises(ProtocolError):
            decode(FRAME[:length])


def test_a_warden_that_is_sent_nonsense_ends_cleanly() -> None:
    chance = random.Random(5)
    native = str(ensure_native())
    for _ in range(60):
        data = bytearray(encode(Kind.RELEASE, chance.randrange(1 << 32), [text(Tag.KILL, "/nonexistent")]))
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if data[6] == Kind.START:
            continue  # that one would be asked to start something
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, open("/dev/null") as lock:
            argv = [native, "warden", str(theirs.fileno()), str(lock.fileno())]
            warden = subprocess.Popen(argv, pass_fds=(theirs.fileno(), lock.fileno()))
            theirs.close()
            assert decode(ours.recv(4096)).kind == Kind.HELLO
            ours.send(data)
            ours.close()
            assert warden.wait(timeout=10) == 0


@pytest.mark.parametrize("values", [(0x10000, 0, 0), (0, 4096, 0), (0, 0, 1 << 60)])
def test_a_result_with_numbers_that_no_kernel_gives_is_refused(values: tuple[int, int, int]) -> None:
    status, setup_errno, user_us = values
    data = struct.pack("<IIQQQQQ", status, setup_errno, user_us, 0, 0, 1, 1)
    with pytest.raises(ProtocolError, match="cannot be"):
        decode(encode(Kind.EXITED, 1, [(Tag.RESULT, data)])).result()


def test_an_errno_that_is_none_is_refused() -> None:
    assert decode(encode(Kind.REFUSED, 1, [number(Tag.ERRNO, 4095)])).errno() == 4095
    assert decode(encode(Kind.REFUSED, 1)).errno(5) == 5
    with pytest.raises(ProtocolError, match="no errno"):
        decode(encode(Kind.REFUSED, 1, [number(Tag.ERRNO, 4096)])).errno()
