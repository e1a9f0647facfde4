"""Trees of files in and out: whole, capped, and never through a link."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from sandbox.errors import ConfigError, SandboxDiedError, SandboxFrozenError, TransferError
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, SandboxSpec, Skipped
from tests.sandbox.waiting import until

pytestmark = pytest.mark.anyio
LIMITS = Limits(disk_bytes=16 * MIB, inodes=2000)


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(limits=LIMITS, jail=jail)) as box:
        yield box


async def sh(box: Sandbox, script: str) -> str:
    outcome = await box.run(Command(argv=("sh", "-c", script)))
    assert outcome.ok, outcome
    return outcome.stdout.decode("utf-8", "surrogateescape")


def member(name: str, data: bytes | None = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    info.size = len(data or b"")
    info.mode = 0o644
    if data is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar_of(*members: tuple[tarfile.TarInfo, bytes | None], format: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format, errors="surrogateescape") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if data else None)
    return buffer.getvalue()


class Told(io.FileIO):
    """A pipe that says when it is first read, which is when its transfer has begun."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "rb")
        self.begun = threading.Event()

    def read(self, size: int | None = -1) -> bytes:
        self.begun.set()
        return super().read(-1 if size is None else size) or b""


def names_in(data: bytes) -> dict[str, tuple[int, bytes | None]]:
    found: dict[str, tuple[int, bytes | None]] = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", errors="surrogateescape") as tar:
        for info in tar.getmembers():
            content = tar.extractfile(info) if info.isreg() else None
            found[info.name] = (info.mode, content.read() if content else None)
    return found


async def test_a_tree_goes_in_and_comes_out_as_it_was(box: Sandbox) -> None:
    big = os.urandom(1_000_001)
    long = "d" * 200 + "/" + "e" * 200
    source = tar_of(
        member("./", None),
        member("a/", None, mode=0o750, mtime=1_000_000_000),
        member("a/empty", b"", mode=0o600),
        member("a/run.sh", b"#!/bin/sh\n", mode=0o6755),
        member("./big", big, mtime=1_234_567_890),
        member("closed/", None, mode=0o555),
        member("closed/inside", b"x", mode=0o444),
        member(f"{long}/f\udcff ü", b"long"),
    )
    report = await box.upload_tar(source)
    assert (report.num_files, report.num_directories) == (5, 2)
    assert report.num_bytes == len(big) + 10 + 1 + 4
    assert await sh(box, "stat -c '%a %u %Y %n' a big closed | head -3") == (
        "750 1000 1000000000 a\n644 1000 1234567890 big\n555 1000 0 closed\n"
    )
    assert await sh(box, "stat -c %a a/run.sh a/empty") == "755\n600\n"
    download = await box.download_tar(max_bytes=4 * MIB)
    found = names_in(download.data)
    assert found["big"] == (0o644, big)
    assert found["a"] == (0o750, None)
    assert found["closed/inside"] == (0o444, b"x")
    assert found[f"{long}/f\udcff ü"] == (0o644, b"long")
    assert (download.num_files, download.num_directories, download.skipped) == (5, 4, ())
    names = list(found)
    assert all(names.index(os.path.dirname(name)) < names.index(name) for name in names if "/" in name)
    again = await box.upload_tar(download.data, "/tmp/deep/copy")
    assert again.num_files == 5
    assert await sh(box, "diff -r /workspace /tmp/deep/copy && echo same") == "same\n"


async def test_what_exists_is_replaced_and_not_written_through(box: Sandbox) -> None:
    await sh(box, "echo old > target; ln target hard; ln -s target soft; mkdir kept; echo x > kept/own")
    await box.upload_tar(tar_of(member("hard", b"new"), member("soft", b"new"), member("kept", None)))
    assert await sh(box, "cat target hard soft kept/own; stat -c %F soft") == "old\nnewnewx\nregular file\n"


async def test_a_source_is_read_from_where_it_stands_seekable_or_not(box: Sandbox) -> None:
    data = tar_of(member("a", b"1" * 70_000), member("b", b"2"))
    stream = io.BytesIO(b"junk" + data)
    stream.seek(4)
    assert (await box.upload_tar(stream, "one")).num_files == 2
    reading, writing = os.pipe()

    async def write() -> None:
        def work() -> None:
            with open(writing, "wb") as pipe:
                pipe.write(data)

        await anyio.to_thread.run_sync(work)

    with os.fdopen(reading, "rb") as pipe:
        async with anyio.create_task_group() as group:
            group.start_soon(write)
            assert (await box.upload_tar(pipe, "/workspace/two")).num_files == 2
    assert await sh(box, "cmp one/a two/a && cmp one/b two/b && echo same") == "same\n"


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "absolute": (lambda: tar_of(member("/etc/x", b"x")), "/etc/x"),
    "climbing": (lambda: tar_of(member("a/../../x", b"x")), "a/../../x"),
    "symlink": (lambda: tar_of(member("l", type=tarfile.SYMTYPE, linkname="/etc")), "'l'"),
    "hard link": (lambda: tar_of(member("l", type=tarfile.LNKTYPE, linkname="x")), "'l'"),
    "device": (lambda: tar_of(member("null", type=tarfile.CHRTYPE)), "null"),
    "fifo": (lambda: tar_of(member("p", type=tarfile.FIFOTYPE)), "'p'"),
    "file and directory": (lambda: tar_of(member("a", b"x"), member("a", None)), "'a'"),
    "below a file": (lambda: tar_of(member("a", b"x"), member("a/b", b"y")), "a/b"),
    "a file where a directory was": (lambda: tar_of(member("a/b", b"y"), member("a", b"x")), "'a'"),
    "long name": (lambda: tar_of(member("n" * 256, b"x")), "nnn"),
    "long path": (lambda: tar_of(member("d/" * 2100 + "x", b"x")), "d/d/d"),
    "too many": (lambda: tar_of(*(member(f"f{i}") for i in range(2001))), "more than 2000"),
    "too deep": (lambda: tar_of(*(member(f"{i}/" + "d/" * 600 + "x") for i in range(5))), "more than 2000"),
    "too large": (lambda: tar_of(member("a", bytes(9 * MIB)), member("b", bytes(9 * MIB))), "'b'"),
    "claims too much": (lambda: tar_of(member("a", None, type=tarfile.REGTYPE, size=1 << 60)), "'a'"),
    "negative size": (lambda: tar_of(member("a", b"", pax_headers={"size": "-512"})), "plain tar"),
    "NUL": (lambda: tar_of(member("a", b"", pax_headers={"path": "a\0b"})), "must be a relative path"),
    "cut in a file": (lambda: tar_of(member("a", bytes(5000)))[:3000], "cannot be read|cut off"),
    "cut between files": (lambda: tar_of(member("a", bytes(512)), member("b", bytes(512)))[:1024], "cut off"),
    "damaged header": (
        lambda: tar_of(member("a", bytes(512))).replace(bytes(1024), b"\xff" * 1024, 1),
        "cut off|cannot be read",
    ),
    "compressed": (lambda: b"\x1f\x8b" + bytes(1000), "plain"),
    "empty": (lambda: b"", "plain"),
    "nonsense": (lambda: os.urandom(100_000), "plain"),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_tar_is_refused_by_name_before_anything_is_unpacked(
    host: SandboxHost, make: tuple[Callable[[], bytes], str]
) -> None:
    async with host.acquire(SandboxSpec(limits=LIMITS)) as box:
        with pytest.raises(ConfigError, match=make[1]):
            await box.upload_tar(make[0]())
        assert await sh(box, "ls -A") == ""


async def test_a_header_of_absurd_length_is_not_read(box: Sandbox) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    with pytest.raises(ConfigError, match="absurd"):
        await box.upload_tar(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_000))


async def test_a_full_disk_names_the_member_and_the_sandbox_lives(host: SandboxHost, jail: JailName) -> None:
    limits = Limits(disk_bytes=4 * MIB, inodes=200)
    async with host.acquire(SandboxSpec(limits=limits, jail=jail)) as box:
        await sh(box, "head -c 3M /dev/zero > there")
        with pytest.raises(TransferError, match="No space") as caught:
            await box.upload_tar(tar_of(member("small", b"x"), member("big", bytes(3 * MIB)), member("more", b"x")))
        assert (caught.value.error, caught.value.path) == (errno.ENOSPC, "/workspace/big")
        with pytest.raises(TransferError) as refused:
            await box.upload_tar(tar_of(member("x", b"x")), "/usr/share/new")
        assert refused.value.error in (errno.EROFS, errno.EACCES)
        assert await sh(box, "cat small") == "x"


async def test_what_is_no_file_is_listed_and_does_not_come_out(box: Sandbox) -> None:
    await sh(
        box,
        "ln -s /etc/passwd link; mkfifo fifo; ln -s / out; mkdir d; echo x > d/f; echo s > d/secret; chmod 0 d/secret;"
        "mkdir locked; echo y > locked/y; chmod 0 locked;"
        "python3 -I -S -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"sock\")'",
    )
    with anyio.fail_after(20):
        download = await box.download_tar(max_bytes=MIB)
    assert set(names_in(download.data)) == {"d", "d/f", "locked"}
    assert set(download.skipped) == {
        Skipped(path="link", kind="symlink"),
        Skipped(path="out", kind="symlink"),
        Skipped(path="fifo", kind="fifo"),
        Skipped(path="sock", kind="socket"),
        Skipped(path="d/secret", kind="unreadable"),
        Skipped(path="locked", kind="unreadable"),
    }
    devices = await box.download_tar("/dev", max_bytes=MIB)
    assert Skipped(path="null", kind="device") in devices.skipped
    for path in ("link", "fifo", "d/f", "out/etc", "absent", "/proc/self/fd"):
        with pytest.raises(TransferError):
            await box.download_tar(path, max_bytes=MIB)


async def test_huge_and_sparse_files_are_refused_by_name_before_they_are_read(box: Sandbox) -> None:
    await sh(box, "mkdir d; truncate -s 8E d/huge 2>/dev/null || truncate -s 60M d/huge; echo x > d/small")
    with anyio.fail_after(20), pytest.raises(TransferError, match="d/huge") as caught:
        await box.download_tar(max_bytes=8 * MIB)
    assert caught.value.error == errno.EFBIG
    await sh(box, "truncate -s 3M d/huge")
    download = await box.download_tar(max_bytes=4 * MIB)
    assert names_in(download.data)["d/huge"] == (0o644, bytes(3 * MIB))
    for cap in (0, 1024, 3 * MIB):
        with pytest.raises(TransferError) as caught:
            await box.download_tar(max_bytes=cap)
        assert caught.value.error == errno.EFBIG
    size = len(download.data)
    assert len((await box.download_tar(max_bytes=size)).data) == size
    with pytest.raises(TransferError):
        await box.download_tar(max_bytes=size - 1)
    with pytest.raises(TransferError) as caught:
        await box.download_tar(max_bytes=4 * MIB, max_entries=2)
    assert caught.value.error == errno.E2BIG


async def test_a_tree_that_changes_while_it_is_read_gives_a_whole_tar(box: Sandbox) -> None:
    churn = """
import os, shutil
os.makedirs("d/e", exist_ok=True)
while True:
    for size in (0, 300_000, 70_000):
        with open("d/f", "wb") as f: f.write(b"z" * 300_000); f.truncate(size)
    shutil.rmtree("d/e", ignore_errors=True)
    if os.path.islink("d/e"): os.unlink("d/e")
    os.symlink("/etc", "d/e"); os.unlink("d/e"); os.mkdir("d/e"); open("d/e/g", "w").write("mine")
"""
    async with box.start(Command(argv=("python3", "-I", "-S", "-c", churn), timeout_s=60)):
        for _ in range(30):
            download = await box.download_tar(max_bytes=2 * MIB)
            for name, (_, content) in names_in(download.data).items():
                assert name in ("d", "d/f", "d/e", "d/e/g")
                assert content is None or set(content) <= set(b"z") or content in (b"", b"mine")


async def test_a_directory_swapped_for_a_link_during_uploads_never_leads_elsewhere(box: Sandbox) -> None:
    await sh(box, "mkdir /tmp/elsewhere")
    swap = "while :; do rm -rf d; ln -s /tmp/elsewhere d; rm -f d; mkdir d; done"
    source = tar_of(member("d", None), *(member(f"d/f{i}", b"x") for i in range(50)))
    async with box.start(Command(argv=("sh", "-c", swap), timeout_s=60)):
        for _ in range(30):
            try:
                await box.upload_tar(source)
            except TransferError:
                continue
    assert await sh(box, "ls -A /tmp/elsewhere") == ""


async def test_a_cancelled_transfer_leaves_no_process_and_the_sandbox_lives(box: Sandbox) -> None:
    await sh(box, "mkdir d; cd d; i=0; while [ $i -lt 1500 ]; do echo x > $i; i=$((i+1)); done")
    stuck_reading, stuck_writing = os.pipe()
    source = Told(stuck_reading)
    for attempt in range(10):
        with anyio.move_on_after(0.001 * attempt):
            await box.download_tar(max_bytes=4 * MIB)
    async with anyio.create_task_group() as group:

        async def upload() -> None:
            with source, pytest.raises(ConfigError, match="empty"):
                await box.upload_tar(source)  # the read that had begun is waited for, and gives nothing

        group.start_soon(upload)
        await until(source.begun.is_set)
        group.cancel_scope.cancel()
        os.close(stuck_writing)
    usage = await box.usage()
    assert usage.pids == 0
    assert await sh(box, "ls d | wc -l") == "1500\n"


async def test_a_transfer_that_a_freeze_caught_can_be_given_up_and_leaves_nothing(box: Sandbox) -> None:
    if "memory" in box.unenforced:
        pytest.skip("this host has no cgroups to freeze")
    reading, writing = os.pipe()
    with Told(reading) as pipe:
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:

                async def upload() -> None:
                    with pytest.raises(ConfigError, match="empty"):
                        await box.upload_tar(pipe)

                group.start_soon(upload)
                await until(pipe.begun.is_set)
                await box.freeze()
                with pytest.raises(SandboxFrozenError):
                    await box.download_tar(max_bytes=MIB)
                assert (await box.usage()).disk_bytes is None
                os.close(writing)
    await box.thaw()
    assert await sh(box, "echo fine") == "fine\n"
    assert (await box.usage()).pids == 0


async def test_code_that_kills_everything_it_can_makes_faults_and_no_broken_tar(box: Sandbox) -> None:
    await box.write_file("f", bytes(MIB))
    source = tar_of(member("g", bytes(MIB)))
    faults = 0
    storm = Command(argv=("sh", "-c", "while :; do kill -9 -1; done"), timeout_s=60)
    async with box.start(storm) as process:
        with anyio.fail_after(50):
            for _ in range(15):
                try:
                    found = names_in((await box.download_tar(max_bytes=4 * MIB)).data)
                    assert found["f"] == (0o644, bytes(MIB))
                    await box.upload_tar(source)
                except TransferError:
                    faults += 1
        assert faults > 0 or not process.running  # without cgroups it has killed its keeper, and ended so
    assert await sh(box, "echo fine") == "fine\n"


async def test_transfers_at_once_do_not_mix(box: Sandbox) -> None:
    async def one(number: int) -> None:
        content = bytes([number]) * 200_000
        await box.upload_tar(tar_of(member("f", content)), f"/workspace/{number}")
        found = names_in((await box.download_tar(f"/workspace/{number}", max_bytes=MIB)).data)
        assert found == {"f": (0o644, content)}

    async with anyio.create_task_group() as group:
        for number in range(8):
            group.start_soon(one, number)


async def test_the_end_of_the_sandbox_ends_a_transfer(host: SandboxHost, jail: JailName) -> None:
    reading, writing = os.pipe()
    source = Told(reading)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            async with host.acquire(SandboxSpec(jail=jail)) as box:

                async def upload() -> None:
                    with source, pytest.raises(SandboxDiedError):
                        await box.upload_tar(source)

                group.start_soon(upload)
                await until(source.begun.is_set)
            os.write(writing, tar_of(member("f", b"a source that is whole, and nobody to unpack it")))
            os.close(writing)


async def test_an_upload_is_charged_to_the_sandbox(box: Sandbox) -> None:
    if "memory" in box.unenforced:
        pytest.skip("this host has no cgroups")
    before = await box.usage()
    await box.upload_tar(tar_of(member("f", bytes(10 * MIB))))
    after = await box.usage()
    assert before.memory_bytes is not None
    assert after.memory_bytes is not None
    assert after.memory_bytes - before.memory_bytes >= 9 * MIB
