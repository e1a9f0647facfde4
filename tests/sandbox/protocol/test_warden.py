"""The engine's side of the warden: who waits is told, what is owed is sent, and nothing waits for ever."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from typing import NoReturn

import anyio
import pytest

from sandbox.build import ensure_native
from sandbox.errors import SandboxDiedError
from sandbox.protocol import warden as warden_module
from sandbox.protocol.link import FrameLink
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import Kind, decode, encode
from tests.sandbox.protocol.test_link import make_pair

FLOODED_ENGINE = """
import os, socket, subprocess, sys, time
native, header, held = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
fds = (theirs.fileno(), held)
warden = subprocess.Popen([native, "warden", *map(str, fds)], pass_fds=fds)
theirs.close()
ours.settimeout(1.0)
if os.fork() == 0:  # holds the socket, and outlives the engine
    os.close(held)
    os.read(0, 1)
    os._exit(0)
try:
    while True:
        ours.send(header)  # each is answered, and no answer is read
except TimeoutError:
    os._exit(0)
"""


def test_a_warden_that_waits_for_a_full_socket_ends_with_its_engine() -> None:
    alive, held = os.pipe()
    with open(alive, "rb"):
        release = encode(Kind.RELEASE, 7).hex()
        argv = [sys.executable, "-c", FLOODED_ENGINE, str(ensure_native()), release, str(held)]
        with subprocess.Popen(argv, pass_fds=(held,), stdin=subprocess.PIPE) as engine:
            os.close(held)
            assert engine.wait(timeout=30) == 0
            readable, _, _ = select.select([alive], [], [], 10)  # at its end: the warden, its last holder, has ended
            assert readable


class Ended:
    """Records that the link's end was reported."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def linked(refusals: int = 0) -> tuple[Warden, socket.socket, Ended]:
    ours, theirs = make_pair(refusals)
    ended = Ended()
    warden = Warden(lambda ident: None, ended)
    warden._link = FrameLink(ours, warden._on_frame, warden._on_link_end)
    return warden, theirs, ended


@pytest.mark.anyio
async def test_who_waits_for_the_warden_is_told_when_it_is_closed() -> None:
    warden, theirs, ended = linked()
    with theirs:

        async def wait() -> None:
            with anyio.fail_after(10), pytest.raises(SandboxDiedError):
                await warden.start(1, [], [])

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_readable(theirs)
            await warden.aclose()
    assert ended.count == 0  # it did not end by itself


@pytest.mark.anyio
async def test_a_release_is_sent_once_the_kernel_has_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warden_module, "_SEND_PAUSE_S", 0.001)
    warden, theirs, _ = linked(refusals=3)
    with theirs:

        async def answer() -> None:
            await anyio.wait_readable(theirs)
            frame = decode(theirs.recv(4096))
            theirs.send(encode(Kind.RELEASED, frame.ident))

        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            with anyio.fail_after(10):
                assert await warden.release(5, [])
        await warden.aclose()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "600"])


@pytest.mark.anyio
async def test_a_warden_that_does_not_end_is_killed_without_holding_up_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warden_module, "_EXIT_TIMEOUT_S", 0.5)
    warden, theirs, _ = linked()

    def never() -> NoReturn:
        pytest.fail("a blocking wait")

    with theirs, sleeper() as process:
        warden._process = process
        with monkeypatch.context() as patch, anyio.fail_after(20):
            patch.setattr(process, "wait", never)
            assert not await warden.aclose()
        assert process.wait() == -9
