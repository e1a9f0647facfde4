"""One set-up serves many siblings: ready at once, for next to nothing, with uids and changes of their own."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from sandbox.host import SandboxHost
from sandbox.pool.config import PoolConfig, Warm
from sandbox.pool.pool import SandboxPool
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, JailName, Limits, SandboxSpec
from tests.sandbox.layers.walks import python, shell
from tests.sandbox.pool.fakes import until

pytestmark = pytest.mark.anyio

NUM_SIBLINGS = 64
NUM_DIRECTORIES, NUM_FILES = 200, 100
READY_S = 0.015
SET_UP = f"""
import os
for d in range({NUM_DIRECTORIES}):
    os.mkdir(f"d{{d}}")
    for f in range({NUM_FILES}):
        with open(f"d{{d}}/f{{f}}", "w") as file: file.write(f"{{d}} {{f}} " * 20)
"""


def available_bytes() -> int:
    """Memory that this host could still give out."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


def free_bytes(path: Path) -> int:
    """Of the file system where layers lie."""
    found = os.statvfs(path)
    return found.f_bfree * found.f_frsize


async def test_siblings_over_twenty_thousand_files_are_ready_at_once(under_host: SandboxHost, jail: JailName) -> None:
    large = Limits(disk_bytes=256 * MIB, inodes=25_000, memory_bytes=512 * MIB)
    spec = SandboxSpec(jail=jail, limits=Limits(disk_bytes=4 * MIB, inodes=1000))
    async with under_host.acquire(SandboxSpec(jail=jail, limits=large)) as parent:
        await python(parent, SET_UP)
        base = await parent.seal()
        assert base.num_entries == NUM_DIRECTORIES * (NUM_FILES + 1)
        warm = PoolConfig(max_leased=NUM_SIBLINGS, warm=(Warm(count=NUM_SIBLINGS, jail=jail),))
        async with SandboxPool.start(under_host, warm) as pool, AsyncExitStack() as leases:
            await until(lambda: pool.statistics().warm == NUM_SIBLINGS)
            memory, disk = available_bytes(), free_bytes(under_host.state_dir)
            boxes, times = [], []
            for _ in range(NUM_SIBLINGS):
                begun_s = time.monotonic()
                boxes.append(await leases.enter_async_context(pool.acquire(spec, base)))
                times.append(time.monotonic() - begun_s)
            assert statistics.median(times) < READY_S, f"p50 {statistics.median(times) * 1e3:.1f} ms"
            assert await shell(boxes[-1], "ls | wc -l; cat d199/f99 | wc -c") == f"{NUM_DIRECTORIES}\n140\n"
            assert (memory - available_bytes()) / NUM_SIBLINGS < MIB
            assert (disk - free_bytes(under_host.state_dir)) / NUM_SIBLINGS < MIB
            assert len({box.jail.host_uid for box in boxes}) == NUM_SIBLINGS
            async with anyio.create_task_group() as group:
                for number, box in enumerate(boxes):
                    group.start_soon(change, box, number)
            await shell(parent, "echo parent >d0/f0; rm d1/f1")
            for number, box in enumerate(boxes):
                changes = [(one.path, one.kind) for one in await box.diff()]
                expected = [("d0/f0", "changed"), (f"d5/f{number}", "deleted"), (f"own{number}", "created")]
                assert sorted(changes) == sorted(expected)
                assert await shell(box, "cat d0/f0; cat d1/f1 | wc -c") == f"{number}\n80\n"
            assert await shell(parent, "cat d0/f0; ls d1 | wc -l; ls | wc -l") == f"parent\n99\n{NUM_DIRECTORIES}\n"


async def change(box: Sandbox, number: int) -> None:
    """What this sibling alone does."""
    await shell(box, f"echo {number} >d0/f0; rm d5/f{number}; echo {number} >own{number}")
