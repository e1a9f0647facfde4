"""A helper process that is left early is killed, also when the engine has no descriptor left for its control group."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import anyio
import pytest

from sandbox.cgroup.absent import AbsentSet
from sandbox.protocol.line import Line
from sandbox.protocol.link import FrameLink
from sandbox.protocol.requests import Requests
from sandbox.protocol.wire import Frame, Kind, decode

pytestmark = pytest.mark.anyio


class Refusing(AbsentSet):
    """One leaf, whose first kills are refused."""

    def __init__(self, leaf: Path) -> None:
        self.leaf = str(leaf)
        self.num_refusals = 2
        self.returned: list[str] = []

    def take_leaf(self) -> str:
        return self.leaf

    def join_files(self, leaf: str) -> tuple[str, ...]:
        return ()

    def kill_leaf(self, leaf: str) -> None:
        if self.num_refusals:
            self.num_refusals -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def return_leaf(self, leaf: str) -> None:
        assert self.num_refusals == 0
        self.returned.append(leaf)


async def test_a_refused_kill_is_told_to_the_agent_and_tried_again(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    kinds: list[Kind] = []
    cgroups = Refusing(tmp_path)
    link = FrameLink(ours, lambda frame, fds: None, lambda why: None)
    line = Line(link, lambda frame, fds: None, lambda why: None)
    requests = Requests(line, lambda: 7, cgroups, ())

    async def be_the_agent() -> None:
        while Kind.KILL not in kinds:
            await anyio.wait_readable(theirs)
            frame: Frame = decode(theirs.recv(4096))
            kinds.append(Kind(frame.kind))
        requests.answered(frame, [])

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(be_the_agent)
            async with requests.helper(Kind.PUT, (), (), ()):
                pass
    assert kinds == [Kind.PUT, Kind.KILL]
    assert cgroups.returned == [str(tmp_path)]
    assert requests._places._set_aside == {}
    link.close()
    theirs.close()
