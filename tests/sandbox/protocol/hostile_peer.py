"""A peer of the engine that answers with broken frames and descriptors that nobody asked for.

Owns: its end of one socket, and the descriptors it passes. Invariant: whatever it sends, the engine's side answers
with outcomes and faults of `sandbox.errors`, leaves no descriptor open and nothing on the event loop.
"""

from __future__ import annotations

import array
import asyncio
import os
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.lowlevel

from sandbox.cgroup.absent import AbsentSet
from sandbox.commands.kept import KeptStreams, Pace
from sandbox.errors import SandboxError
from sandbox.jail import Jail, JailKey
from sandbox.protocol.link import FrameLink
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import Kind, Tag, encode, number, text
from sandbox.sandbox import Sandbox
from sandbox.types import Command, SandboxSpec
from tests.sandbox.protocol.mutation import mutated

_RESULT_BYTES = 48
_SPACE_BYTES = 24
_SILENCE_S = 0.1
AGENT_KINDS = (Kind.EXITED, Kind.OPENED, Kind.REFUSED, Kind.SPACE)
WARDEN_KINDS = (Kind.HELLO, Kind.STARTED, Kind.FAILED, Kind.RELEASED, Kind.DIED)
LONGEST_S = 30.0


class Passed:
    """Descriptors of many kinds to pass along."""

    def __init__(self) -> None:
        handle, path = tempfile.mkstemp()
        os.write(handle, b"content")
        unreadable = os.open(path, os.O_WRONLY)
        bare = os.open(path, os.O_PATH)
        os.unlink(path)
        sparse = os.memfd_create("sparse")
        os.truncate(sparse, 1 << 40)
        folder = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
        self.fds = [handle, unreadable, bare, sparse, folder, *os.pipe()]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _answers(chance: random.Random, ident: int) -> list[bytes]:
    result = chance.choice((bytes(_RESULT_BYTES), chance.randbytes(_RESULT_BYTES), b"\xff" * _RESULT_BYTES))
    return [
        encode(Kind.EXITED, ident, [(Tag.RESULT, result)]),
        encode(
            Kind.REFUSED, ident, [number(Tag.ERRNO, chance.choice((1, 11, 12, 4095, 4096, 1 << 31, (1 << 32) - 1)))]
        ),
        encode(Kind.OPENED, ident),
        encode(Kind.SPACE, ident, [(Tag.SPACE, chance.randbytes(_SPACE_BYTES))]),
        encode(Kind.STARTED, ident),
        encode(Kind.RELEASED, ident, [number(Tag.ERRNO, 16)]),
        encode(Kind.FAILED, ident, [number(Tag.ERRNO, (1 << 32) - 1), text(Tag.TEXT, "\udcff")]),
        encode(Kind.FAILED, ident, [number(Tag.ERRNO, (1 << 32) - 1)]),
        encode(Kind.DIED, ident),
        encode(Kind.HELLO, ident),
    ]


class HostilePeer:
    """Answers every request with a burst of frames, and goes after `num_frames`."""

    def __init__(self, chance: random.Random, end: socket.socket, passed: Passed, num_frames: int) -> None:
        self._chance = chance
        self._end = end
        self._passed = passed
        self._left = num_frames
        self.num_sent = 0
        end.setblocking(False)

    async def serve(self) -> None:
        """Until the engine's side closes, or all is sent."""
        kinds = [int(kind) for kind in (*AGENT_KINDS, *WARDEN_KINDS)]
        try:
            while self.num_sent < self._left:
                with anyio.move_on_after(_SILENCE_S) as waiting:
                    await anyio.wait_readable(self._end)
                if waiting.cancelled_caught:  # every waiter waits for an answer that does not come
                    return
                data, control, _, _ = self._end.recvmsg(1 << 18, socket.CMSG_SPACE(4 * 64))
                for _, _, rights in control:
                    fds = array.array("i")
                    fds.frombytes(rights)
                    for fd in fds:
                        os.close(fd)
                if not data:
                    return
                ident = int.from_bytes(data[8:12], "little")
                burst = self._chance.choice((0, 1, 1, 2, 5))
                shaped = self._chance.random() < 0.9
                frames = _answers(self._chance, ident)
                for frame in mutated(self._chance, frames, burst, kinds, shaped=shaped):
                    self._send(frame)
        except OSError:
            return  # the other side has closed
        finally:
            self._end.close()

    def _send(self, frame: bytes) -> None:
        count = self._chance.choice((0, 0, 0, 1, 1, 2, 7, 8, 9, 40))
        rights = array.array("i", [self._chance.choice(self._passed.fds) for _ in range(count)])
        with suppress(BlockingIOError):
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
            self._end.sendmsg([frame[:65_536]], control)
            self.num_sent += 1


async def _tolerant(action: Awaitable[object]) -> None:
    with suppress(SandboxError), anyio.move_on_after(1.0):
        await action


@asynccontextmanager
async def _no_trace() -> AsyncIterator[None]:
    """Fails when the event loop was told of an exception, or descriptors are left."""
    problems: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    before = sorted(os.listdir("/proc/self/fd"))
    loop.set_exception_handler(lambda _, context: problems.append(context))
    try:
        with anyio.fail_after(LONGEST_S):
            yield
        await anyio.lowlevel.checkpoint()
        assert not problems, problems
    finally:
        loop.set_exception_handler(None)
    left = sorted(os.listdir("/proc/self/fd"))
    assert left == before, f"descriptors {set(left) ^ set(before)}"


async def attack_sandbox(chance: random.Random, passed: Passed, num_frames: int) -> int:
    """One sandbox whose agent is hostile, under every kind of request; returns how many frames it sent."""
    async with _no_trace():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = HostilePeer(chance, theirs, passed, num_frames)
        jail = Jail(ours, JailKey.of(SandboxSpec()))
        box = Sandbox(jail, SandboxSpec(), {}, AbsentSet(), ("memory", "pids", "cpus"), KeptStreams(Pace()))
        actions: list[Callable[[], Awaitable[object]]] = [
            lambda: box.run(Command(argv=("true",), timeout_s=0.05)),
            lambda: box.run(Command(argv=("cat",), stdin=b"x" * 100_000)),
            lambda: box.read_file("f", chance.choice((3, 100_000))),
            lambda: box.write_file("f", b"y" * 100_000),
            lambda: box.usage(),
        ]

        async def requests() -> None:
            while box.alive:
                with anyio.move_on_after(chance.choice((0.0, 0.001, 0.01, 0.5))):
                    await _tolerant(chance.choice(actions)())

        async with anyio.create_task_group() as group:
            group.start_soon(peer.serve)
            for _ in range(3):
                group.start_soon(requests)
        box.close()
    return peer.num_sent


async def attack_engine(chance: random.Random, passed: Passed, num_frames: int) -> int:
    """The engine's end of a hostile warden; returns how many frames it sent."""
    async with _no_trace():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = HostilePeer(chance, theirs, passed, num_frames)
        ended = anyio.Event()
        warden = Warden(lambda ident: None, ended.set)
        warden._link = FrameLink(ours, warden._on_frame, warden._on_link_end)

        async def requests(first: int) -> None:
            while not ended.is_set():
                ident = first + chance.randrange(3)
                with anyio.move_on_after(chance.choice((0.0, 0.001, 0.01, 0.5))):
                    await _tolerant(warden.start(ident, [text(Tag.ARGV, "x")], passed.fds[:1]))
                    await _tolerant(warden.release(ident, []))

        async with anyio.create_task_group() as group:
            group.start_soon(peer.serve)
            for number_of_user in range(3):
                group.start_soon(requests, 10 * number_of_user)
        await warden.aclose()
    return peer.num_sent
