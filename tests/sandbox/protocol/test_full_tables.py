"""A full table of descriptors, in whichever process, fails one request and ends no sandbox."""

from __future__ import annotations

import array
import errno
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandbox.build import ensure_native
from sandbox.errors import ExhaustedError
from sandbox.host import SandboxHost
from sandbox.protocol.wire import Frame, Kind, Tag, decode, encode, text
from sandbox.types import Command, JailName, SandboxSpec


@contextmanager
def full_table(pid: int) -> Iterator[None]:
    """That process can open nothing more meanwhile."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))  # those three are taken
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def bare_warden() -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open("/dev/null") as lock:
        fds = (theirs.fileno(), lock.fileno())
        with subprocess.Popen([str(ensure_native()), "warden", *map(str, fds)], pass_fds=fds) as warden:
            theirs.close()
            try:
                ours.settimeout(10)
                assert decode(ours.recv(4096)).kind == Kind.HELLO
                yield warden, ours
            finally:
                ours.close()  # its end
            assert warden.wait(timeout=10) == 0


def ask(end: socket.socket, kind: Kind, *fds: int) -> Frame:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([encode(kind, 7, [text(Tag.ARGV, "/nonexistent")])], rights)
    return decode(end.recv(4096))


def test_a_warden_without_descriptors_refuses_a_start_and_goes_on() -> None:
    with bare_warden() as (warden, end):
        with full_table(warden.pid):
            answer = ask(end, Kind.START, end.fileno())
            assert (answer.kind, answer.ident, answer.errno()) == (Kind.FAILED, 7, errno.EMFILE)
        assert ask(end, Kind.RELEASE).kind == Kind.RELEASED


@pytest.mark.anyio
async def test_an_engine_without_descriptors_fails_a_read_and_keeps_the_sandbox(
    host: SandboxHost, jail: JailName
) -> None:
    async with host.acquire(SandboxSpec(jail=jail)) as box:
        await box.write_file("f", b"content")
        with full_table(os.getpid()):
            with pytest.raises(ExhaustedError, match="no descriptors are left in this process") as caught:
                await box.read_file("f", 100)
            assert (caught.value.resource, "ulimit -n" in caught.value.remedy) == ("descriptors", True)
            with pytest.raises(ExhaustedError, match="Too many open files"):
                await box.run(Command(argv=("true",)))
        assert box.alive
        assert await box.read_file("f", 100) == b"content"


@pytest.mark.anyio
@pytest.mark.parametrize("whose", ["the engine's", "the warden's"])
async def test_a_start_without_descriptors_says_what_has_run_out_and_how_to_have_more(
    host: SandboxHost, jail: JailName, whose: str
) -> None:
    spec = SandboxSpec(jail=jail)
    async with host.acquire(spec):  # what is staged at the first use is there
        pass
    pid = os.getpid() if whose == "the engine's" else host._warden.pid
    with full_table(pid):
        with pytest.raises(ExhaustedError, match="ulimit -n") as caught:
            async with host.acquire(spec):
                pass
    assert caught.value.resource == "descriptors"
    async with host.acquire(spec) as box:
        assert (await box.run(Command(argv=("true",)))).ok
    assert host.num_live == 0
