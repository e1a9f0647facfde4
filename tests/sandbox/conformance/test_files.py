"""Files: only regular ones cross the boundary, only inside paths are resolved, and only so many bytes come."""

from __future__ import annotations

import errno
import io
import os
import signal
import tarfile
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from sandbox.errors import ConfigError, TransferError
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Limits, Reason
from tests.sandbox.conformance.arena import PATIENCE_S, Arena, python, sh, shell
from tests.sandbox.conformance.measure import memory_growth

pytestmark = pytest.mark.anyio

CANARY = b"a file of the host"
SWAP = """
import ctypes, os
rename = ctypes.CDLL(None, use_errno=True).renameat2
AT_FDCWD, RENAME_EXCHANGE = -100, 2
while rename(AT_FDCWD, b"d", AT_FDCWD, b"link", RENAME_EXCHANGE) == 0:
    pass
raise OSError(ctypes.get_errno(), "renameat2")
"""
NUM_EACH = 30
"""Transfers that must have met the directory, and as many that must have met the link."""


@pytest.fixture
def canary() -> Iterator[Path]:
    """A directory of the host that anyone may write, with a file that anyone may read."""
    with tempfile.TemporaryDirectory(prefix="rollout-canary-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "file").write_bytes(CANARY)
        yield folder


async def test_a_link_is_refused_on_the_way_out_and_in(box: Sandbox, canary: Path) -> None:
    await sh(box, f"ln -s {canary}/file out; ln -s /etc/passwd passwd; ln -s {canary} folder; ln -s / root")
    for path in ("out", "passwd", "folder", "root"):
        with pytest.raises(TransferError):
            await box.read_file(path, MIB)
        with pytest.raises(TransferError):
            await box.write_file(path, b"owned")
    for path in (f"root{canary}/file", "folder/file", f"root/../../..{canary}/file", f"../../..{canary}/file"):
        with pytest.raises(TransferError) as caught:
            await box.read_file(path, MIB)
        assert caught.value.error == errno.ENOENT  # resolved inside, where it does not exist
    assert (canary / "file").read_bytes() == CANARY


async def test_a_path_through_the_root_is_the_sandboxs_own(box: Sandbox) -> None:
    await sh(box, "ln -s / root")
    passwd = await box.read_file("root/etc/passwd", MIB)
    assert b"sandbox:x:1000" in passwd
    assert passwd != await anyio.Path("/etc/passwd").read_bytes()


async def test_what_is_no_regular_file_is_refused_in_both_directions(box: Sandbox) -> None:
    await sh(box, "mkfifo fifo; mkdir dir; ln -s /proc/1 agent")
    await box.run(python("import socket; socket.socket(socket.AF_UNIX).bind('socket')"))
    for path in ("fifo", "dir", "socket", "/dev/zero", "/dev/null", "agent/environ", "/proc/self/fd/3", "absent"):
        with pytest.raises(TransferError), anyio.fail_after(PATIENCE_S):
            await box.read_file(path, MIB)
    for path in ("fifo", "dir", "socket", "/etc/x", "/dev/null", "/proc/self/fd/3", "/usr/bin/env"):
        with pytest.raises(TransferError), anyio.fail_after(PATIENCE_S):
            await box.write_file(path, b"x")


async def test_a_huge_sparse_file_is_refused_by_its_size(arena: Arena) -> None:
    limits = Limits(disk_bytes=16 * MIB, memory_bytes=96 * MIB, pids=24, file_size_bytes=1 << 44)
    async with arena.hostile(limits) as box:
        assert (await sh(box, "truncate -s 10T f; truncate -s 60M g")).ok
        with memory_growth() as growth:
            for name, cap in (("f", MIB), ("f", 1 << 40), ("g", 50 * MIB)):
                with pytest.raises(TransferError, match="over the cap") as caught:
                    await box.read_file(name, cap)
                assert caught.value.error == errno.EFBIG
        assert growth.peak_bytes < 8 * MIB
        refused = await sh(box, "exec truncate -s 1E h")
        assert (refused.reason, refused.signal) == (Reason.SIGNAL, signal.SIGXFSZ)


async def test_a_cap_is_exact(box: Sandbox) -> None:
    await sh(box, "head -c 2000 /dev/zero > small")
    with pytest.raises(TransferError, match="over the cap"):
        await box.read_file("small", 1999)
    assert await box.read_file("small", 2000) == bytes(2000)


async def test_a_file_that_grows_while_it_is_read_stays_below_its_cap(box: Sandbox) -> None:
    grow = "while :; do head -c 100000 /dev/zero >> f; [ $(stat -c %s f) -gt 4000000 ] && : > f; done"
    async with box.start(shell(grow, timeout_s=PATIENCE_S)):
        num_read = 0
        while num_read < 20:
            try:
                assert len(await box.read_file("f", 3_000_000)) <= 3_000_000
            except TransferError as error:
                if error.error == errno.ENOENT:
                    continue  # not yet begun
                if error.error != errno.EFBIG:
                    raise
            num_read += 1


async def test_an_upload_over_the_quota_fails_as_one_and_the_sandbox_lives(box: Sandbox) -> None:
    with pytest.raises(TransferError, match="No space") as caught:
        await box.write_file("big", bytes(20 * MIB))
    assert caught.value.error == errno.ENOSPC
    await sh(box, "rm -f big")
    await box.write_file("fits", bytes(1 * MIB))
    assert (await sh(box, "stat -c %s fits")).stdout == b"1048576\n"


@asynccontextmanager
async def swapping(box: Sandbox, canary: Path) -> AsyncIterator[None]:
    """`d` is in turn a directory with a file and a link to the canary.

    The two are exchanged in one step: a gap would be filled by the next upload, which makes the directory anew, and a
    link would then hardly ever be met where uploads are faster than the swap.
    """
    prepared = await sh(box, f"mkdir d && echo mine > d/file && ln -s {canary} link")
    assert prepared.ok, prepared
    async with box.start(python(SWAP, timeout_s=2 * PATIENCE_S)):
        with anyio.fail_after(PATIENCE_S):
            yield


async def test_a_directory_swapped_for_a_link_during_uploads_never_leads_outside(box: Sandbox, canary: Path) -> None:
    num_written, refusals = 0, list[int]()
    async with swapping(box, canary):
        while min(num_written, len(refusals)) < NUM_EACH:
            try:
                await box.write_file("/workspace/d/file", b"owned")
                num_written += 1
            except TransferError as error:
                refusals.append(error.error)
    assert set(refusals) == {errno.ENOENT}  # the canary does not exist inside
    assert (canary / "file").read_bytes() == CANARY
    assert os.listdir(canary) == ["file"]


async def test_a_directory_swapped_for_a_link_during_downloads_never_leads_outside(box: Sandbox, canary: Path) -> None:
    num_read, refusals = 0, list[int]()
    async with swapping(box, canary):
        while min(num_read, len(refusals)) < NUM_EACH:
            try:
                assert await box.read_file("/workspace/d/file", MIB) == b"mine\n"
                num_read += 1
            except TransferError as error:
                refusals.append(error.error)
    assert set(refusals) == {errno.ENOENT}


async def test_a_tree_crosses_as_plain_files_and_a_crafted_one_not_at_all(box: Sandbox, canary: Path) -> None:
    await sh(box, f"mkdir -p t/d; echo x > t/d/f; ln -s {canary}/file t/out; ln -s / t/root; mkfifo t/fifo")
    tree = await box.download_tar("t", max_bytes=MIB)
    with tarfile.open(fileobj=io.BytesIO(tree.data)) as archive:
        assert {member.name: member.type for member in archive} == {"d": tarfile.DIRTYPE, "d/f": tarfile.REGTYPE}
    assert {(one.path, one.kind) for one in tree.skipped} == {("out", "symlink"), ("root", "symlink"), ("fifo", "fifo")}
    for name, kind, link in (
        ("../out", tarfile.REGTYPE, ""),
        (f"{canary}/file", tarfile.REGTYPE, ""),
        ("l", tarfile.SYMTYPE, str(canary)),
        ("h", tarfile.LNKTYPE, "/etc/passwd"),
        ("n", tarfile.CHRTYPE, ""),
    ):
        crafted = io.BytesIO()
        with tarfile.open(fileobj=crafted, mode="w") as archive:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            archive.addfile(member)
        with pytest.raises(ConfigError):
            await box.upload_tar(crafted.getvalue())
    assert (await sh(box, "ls")).stdout == b"t\n"
    assert (canary / "file").read_bytes() == CANARY


async def test_cgroups_and_the_kernels_settings_are_absent_or_read_only(box: Sandbox) -> None:
    for path in (
        "/sys/fs/cgroup/x",
        "/sys/fs/cgroup/memory/x",
        "/sys/x",
        "/proc/x",
        "/x",
        "/usr/x",
        "/etc/x",
        "/dev/x",
    ):
        outcome = await sh(box, f"mkdir {path}")
        assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 1), path
    script = (
        "for f in /proc/sys/kernel/* /proc/sys/vm/* /proc/sysrq-trigger; do (echo 1 > $f) 2>/dev/null && echo $f; done"
    )
    assert (await sh(box, f"{script}; true")).stdout == b""


async def test_an_uploaded_file_has_its_mode_and_owner_and_no_privilege(box: Sandbox) -> None:
    await box.write_file("tool", b"#!/bin/sh\nid -u\n", mode=0o6755)
    outcome = await sh(box, "stat -c '%a %u %g' tool; ./tool")
    assert outcome.stdout.split()[1:] == [b"1000", b"1000", b"1000"]
    data = os.urandom(300_000)
    await box.write_file("/workspace/a/b/c", data, mode=0o640)
    assert await box.read_file("a/b/c", MIB) == data
    assert (await sh(box, "stat -c '%a %u' a/b/c")).stdout == b"640 1000\n"
