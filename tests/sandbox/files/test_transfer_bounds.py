"""What a transfer may hold up and how much it may bring: neither other work nor more than its caps."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from sandbox.errors import ConfigError, TransferError
from sandbox.files.download import TarBuilder
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, JailName, Limits, SandboxSpec
from tests.sandbox.files.test_archive import member, sh, tar_of

pytestmark = pytest.mark.anyio
NUM_STUCK = 3


@pytest.fixture
async def box(host: SandboxHost, jail: JailName) -> AsyncIterator[Sandbox]:
    async with host.acquire(SandboxSpec(limits=Limits(disk_bytes=16 * MIB, inodes=2000), jail=jail)) as box:
        yield box


async def test_sources_that_give_nothing_hold_up_no_other_work(host: SandboxHost, box: Sandbox, tmp_path: Path) -> None:
    async def upload(fd: int) -> None:
        with os.fdopen(fd, "rb") as pipe, pytest.raises(ConfigError, match="empty"):
            await box.upload_tar(pipe)

    pipes = [os.pipe() for _ in range(NUM_STUCK)]
    shared = anyio.to_thread.current_default_thread_limiter()
    known, shared.total_tokens = shared.total_tokens, NUM_STUCK - 1
    (tmp_path / "f").write_text("here")
    try:
        async with anyio.create_task_group() as group:
            for reading, _ in pipes:
                group.start_soon(upload, reading)
            await anyio.wait_all_tasks_blocked()
            with anyio.move_on_after(20) as waited:
                async with host.acquire(SandboxSpec(workspace=str(tmp_path))) as other:
                    assert await other.read_file("f", 10) == b"here"
            for _, writing in pipes:
                os.close(writing)
        assert not waited.cancelled_caught
    finally:
        shared.total_tokens = known


class Slow(io.BytesIO):
    """A tenth of a second for each read."""

    def read(self, size: int | None = -1) -> bytes:
        time.sleep(0.1)
        return super().read(size)


async def test_a_slow_source_is_given_up_at_a_cancellation(box: Sandbox) -> None:
    source = Slow(tar_of(*(member(f"f{i}") for i in range(1000))))
    started_s = time.monotonic()
    with anyio.move_on_after(0.2):
        await box.upload_tar(source)
    assert time.monotonic() - started_s < 20
    assert await sh(box, "ls -A") == ""


async def test_names_of_what_is_skipped_are_charged_by_the_helper_too(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sh(
        box,
        "n=$(head -c 200 /dev/zero | tr '\\0' n); for i in 1 2 3 4 5; do mkdir $n && cd $n; done;"
        "i=0; while [ $i -lt 300 ]; do ln -s x $i; i=$((i+1)); done",
    )
    assert len((await box.download_tar(max_bytes=MIB)).skipped) == 300
    monkeypatch.setattr(TarBuilder, "_charge_skipped", lambda self, record: None)
    with pytest.raises(TransferError) as caught:
        await box.download_tar(max_bytes=MIB // 8)
    assert caught.value.error == errno.EFBIG


async def test_a_tree_with_closed_directories_is_unpacked_over_itself(box: Sandbox) -> None:
    for content in (b"first", b"again"):
        await box.upload_tar(
            tar_of(
                member("d", None, mode=0o555),
                member("d/e", None, mode=0o111),
                member("d/e/f", content, mode=0o444),
            )
        )
        assert await sh(box, "stat -c %a d d/e d/e/f; cat d/e/f") == f"555\n111\n444\n{content.decode()}"
