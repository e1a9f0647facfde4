"""A host that has run out of something says so, by a type and with a remedy."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import pytest

from sandbox.errors import ExhaustedError, SandboxError, StartError
from sandbox.exhaustion import exhausted_writing, fault, fault_in
from sandbox.host import SandboxConfig, SandboxHost

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000


@pytest.mark.parametrize(
    ("number", "resource", "word"),
    [
        (errno.EMFILE, "descriptors", "ulimit -n"),
        (errno.ENFILE, "descriptors", "fs.file-max"),
        (errno.ENOMEM, "memory", "max_sandboxes"),
        (errno.EAGAIN, "processes", "kernel.pid_max"),
        (errno.ENOSPC, "namespaces, mounts or control groups", "user.max_"),
    ],
)
def test_each_errno_of_want_has_its_resource_and_remedy(number: int, resource: str, word: str) -> None:
    for error in (fault("it failed", number, StartError), fault_in(f"bwrap: {os.strerror(number)}", StartError)):
        assert isinstance(error, ExhaustedError)
        assert error.resource == resource
        assert word in error.remedy
        assert word in str(error)


def test_what_says_nothing_of_want_stays_what_the_caller_names() -> None:
    for error in (fault("it failed", errno.EPERM, StartError), fault_in("bwrap: no such tool", StartError)):
        assert type(error) is StartError
    assert type(fault("it failed", None)) is SandboxError
    assert exhausted_writing("/x", PermissionError(errno.EACCES, "no")) is None


def fill(state_dir: str, told: Connection) -> None:
    """In a mount namespace of its own: an engine on a full disk; tells what it raised."""
    libc = ctypes.CDLL(None, use_errno=True)
    steps = (
        lambda: libc.unshare(CLONE_NEWNS),
        lambda: libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", state_dir.encode(), b"tmpfs", 0, b"size=64k,mode=755"),
    )
    for step in steps:
        if step() != 0:
            told.send((os.strerror(ctypes.get_errno()), "", ""))
            return
    try:
        anyio.run(start, state_dir)
    except SandboxError as error:
        told.send((type(error).__name__, getattr(error, "resource", ""), getattr(error, "remedy", "")))


async def start(state_dir: str) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=state_dir)):
        pass


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that every user may enter, as root's state directory must be."""
    path = Path(tempfile.mkdtemp(prefix="rollout-full-"))
    path.chmod(0o755)
    yield path
    path.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="environment: mounting a file system needs root")
def test_a_full_state_directory_is_a_fault_that_names_the_disk(open_folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=fill, args=(str(open_folder), writing))
    child.start()
    writing.close()
    assert reading.poll(60)
    kind, resource, remedy = reading.recv()
    child.join(30)
    assert (kind, resource) == ("ExhaustedError", "disk space")
    assert "state_dir" in remedy
