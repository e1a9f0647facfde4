"""The frame socket: what nobody waits for is sent all the same, or the link ends and says so."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from sandbox.protocol import link as link_module
from sandbox.protocol.link import FrameLink
from sandbox.protocol.wire import Kind, decode, encode

pytestmark = pytest.mark.anyio


class ShortOfMemory(socket.socket):
    """Refuses so many frames for want of memory."""

    refusals = 0

    def sendmsg(self, buffers: Any, *rest: Any) -> int:
        if self.refusals > 0:
            self.refusals -= 1
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return super().sendmsg(buffers, *rest)


def make_pair(refusals: int) -> tuple[ShortOfMemory, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    short = ShortOfMemory(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, ours.detach())
    short.refusals = refusals
    return short, theirs


def ignore(*_: Sequence[Any]) -> None:
    """Takes what comes."""


async def test_an_order_to_kill_is_sent_once_the_kernel_has_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_POST_PAUSE_S", 0.001)
    ours, theirs = make_pair(refusals=3)
    with theirs:
        link = FrameLink(ours, ignore, ignore)
        link.post(encode(Kind.KILL, 7))
        with anyio.fail_after(10):
            await anyio.wait_readable(theirs)
        frame = decode(theirs.recv(4096))
        link.close()
    assert (frame.kind, frame.ident) == (Kind.KILL, 7)


async def test_a_link_that_cannot_send_an_order_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_POST_PAUSE_S", 0.001)
    monkeypatch.setattr(link_module, "_POST_TIMEOUT_S", 0.05)
    ended, reasons = anyio.Event(), []

    def on_end(why: str) -> None:
        reasons.append(why)
        ended.set()

    ours, theirs = make_pair(refusals=1_000_000)
    with theirs:
        link = FrameLink(ours, ignore, on_end)
        link.post(encode(Kind.KILL, 7))
        with anyio.fail_after(10):
            await ended.wait()
        assert not link.open
        assert theirs.recv(4096) == b""
    assert os.strerror(errno.ENOBUFS) in reasons[0]


async def test_an_order_waits_for_a_full_socket() -> None:
    ours, theirs = make_pair(refusals=0)
    with theirs:
        link = FrameLink(ours, ignore, ignore)
        num_sent = 0
        while link.send_nowait(encode(Kind.KILL, num_sent)):
            num_sent += 1
        link.post(encode(Kind.KILL, num_sent))
        with anyio.fail_after(10):
            for ident in range(num_sent + 1):
                await anyio.wait_readable(theirs)
                assert decode(theirs.recv(4096)).ident == ident
        link.close()
