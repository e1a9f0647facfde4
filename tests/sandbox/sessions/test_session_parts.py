"""The parts of a session by themselves: its words, and peers that say what none should."""

from __future__ import annotations

import socket

import anyio
import pytest

from sandbox.protocol.wire import Kind, Tag, decode, encode
from sandbox.sessions.control import Control
from sandbox.sessions.dialect import Report, parse_env, parse_report, run_lines, script_bytes
from sandbox.sessions.holder import Holder, HolderGoneError

pytestmark = pytest.mark.anyio
HELD = b"\x05\0\0\0\x02\0\0\0" + bytes(24)


@pytest.mark.parametrize(
    ("packet", "report"),
    [
        (b"3 0\n", Report(3, 0, False)),
        (b"12 255 .\n", Report(12, 255, True)),
        (b"3 256\n", None),
        (b"3 0", None),
        (b"3 0\n3 0\n", None),
        (b"-3 0\n", None),
        (b"9999999999 0\n", None),
        ("٣ 0\n".encode(), None),
        (b"", None),
        (b"3 0 . \n", None),
    ],
)
def test_a_report_is_well_formed_or_none(packet: bytes, report: Report | None) -> None:
    assert parse_report(packet) == report


def test_lines_are_short_enough_for_what_a_shell_reads_at_once() -> None:
    most = {"stdin": True, "shadowed": True}
    for bash in (True, False):
        for terminal in (True, False):
            for line in run_lines(4_194_304, 999_999_999, 255, bash=bash, terminal=terminal, **most):
                assert len(line) < 500
                assert "\n" not in line


def test_a_script_is_not_touched() -> None:
    assert script_bytes("a\udcff\n", 3, shadowed=False) == b"a\xff\n\n"
    assert script_bytes("a", 3, shadowed=True).count(b"\n") == 2


def test_variables_are_read_whatever_is_in_them() -> None:
    environ = b"A=1\0B=x=y\nz\0_=/bin/cat\0POSIXLY_CORRECT=rollout\0C=\xff\0=odd\0odd\0"
    assert parse_env(environ) == {"A": "1", "B": "x=y\nz", "C": "\udcff"}
    assert parse_env(b"POSIXLY_CORRECT=y\0") == {"POSIXLY_CORRECT": "y"}


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def test_a_control_socket_stops_listening_at_the_first_nonsense() -> None:
    ours, theirs = pair()
    heard: list[Report | str] = []
    control = Control(ours, heard.append, lambda: heard.append("nonsense"))
    with theirs:
        for packet in (b"1 0\n", b"2 7 .\n", b"x" * 5000, b"3 0\n"):
            theirs.send(packet)
        await anyio.sleep(0.05)
        assert heard == [Report(1, 0, False), Report(2, 7, True), "nonsense"]
        control.say("line", "another")
        assert (theirs.recv(100), theirs.recv(100)) == (b"line\n", b"another\n")
    control.say("nobody listens")
    control.close()
    control.close()


async def test_a_full_or_closed_control_socket_is_no_fault() -> None:
    ours, theirs = pair()
    heard: list[object] = []
    control = Control(ours, heard.append, lambda: heard.append("nonsense"))
    for _ in range(5000):
        control.say("line")
    theirs.close()
    await anyio.sleep(0.02)
    assert heard == []
    control.close()


@pytest.mark.parametrize(
    "answer",
    [
        encode(Kind.HELD, 1, [(Tag.HELD, HELD[:-1])]),
        encode(Kind.HELD, 1, []),
        encode(Kind.HELD, 2, [(Tag.HELD, HELD)]),
        encode(Kind.EXITED, 1, [(Tag.HELD, HELD)]),
        encode(Kind.HELD, 1, [(Tag.HELD, HELD[:8] + b"\xff" * 24)]),
        b"nonsense",
        b"",
    ],
)
async def test_a_holder_that_answers_nonsense_is_gone(answer: bytes) -> None:
    ours, theirs = pair()
    holder = Holder(ours)
    with theirs:
        theirs.send(answer) if answer else theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(HolderGoneError):
            await holder.ask(Kind.LOOK)
    with pytest.raises(HolderGoneError):
        await holder.ask(Kind.LOOK)
    holder.drop()
    holder.close()


async def test_a_holder_is_heard_when_it_is_asked_and_not_before() -> None:
    ours, theirs = pair()
    theirs.setblocking(False)
    holder = Holder(ours)
    with theirs:
        async with anyio.create_task_group() as group:

            async def answer() -> None:
                await anyio.wait_readable(theirs)
                asked = decode(theirs.recv(1000))
                assert (asked.kind, asked.ident) == (Kind.LOOK, 1)
                theirs.send(encode(Kind.HELD, 1, [(Tag.HELD, HELD), (Tag.CWD, b"relative\0")]))

            group.start_soon(answer)
            held, directory = await holder.ask(Kind.LOOK)
        assert (held.pid, held.num_left, directory) == (5, 2, None)
        theirs.send(encode(Kind.HELD, 2, [(Tag.HELD, HELD)]))
        await anyio.sleep(0.02)
        with pytest.raises(HolderGoneError):
            await holder.ask(Kind.LOOK)
    holder.close()
