"""A host that has run out of something says so, by a type and with a remedy."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.errors import ExhaustedError, SandboxError, StartError
from sandbox.exhaustion import exhausted_writing, fault, fault_in
from tests.sandbox.conftest import REPOSITORY


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


ENGINE_ON_A_FULL_DISK = """
import ctypes, os, sys
import anyio
from sandbox.errors import SandboxError
from sandbox.host import SandboxConfig, SandboxHost

CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
state_dir, libc = sys.argv[1], ctypes.CDLL(None, use_errno=True)
for failed in (
    libc.unshare(CLONE_NEWNS),
    libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
    libc.mount(b"tmpfs", state_dir.encode(), b"tmpfs", 0, b"size=64k,mode=755"),
):
    assert not failed, os.strerror(ctypes.get_errno())

async def main():
    async with SandboxHost.start(SandboxConfig(state_dir=state_dir)):
        pass

try:
    anyio.run(main)
except SandboxError as error:
    print(type(error).__name__, getattr(error, "resource", ""), getattr(error, "remedy", ""), sep="|")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that every user may enter, as root's state directory must be."""
    path = Path(tempfile.mkdtemp(prefix="rollout-full-"))
    path.chmod(0o755)
    yield path
    path.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="environment: mounting a file system needs root")
def test_a_full_state_directory_is_a_fault_that_names_the_disk(open_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_ON_A_FULL_DISK, str(open_folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kind, resource, remedy = done.stdout.split("|")
    assert (kind, resource) == ("ExhaustedError", "disk space")
    assert "state_dir" in remedy
