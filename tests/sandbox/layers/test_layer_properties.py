"""Random sequences of acquire, run, fork, seal, cancel, kill, release and close, by several at once, on a real pool.

Looked at on the way: every sandbox shows exactly what its base holds (as a model says), under the disk limit that it
asked for. At the end: no layer, pin, jail or half-made thing is left.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from sandbox.errors import LayerError, SandboxDiedError, StartError
from sandbox.health.census import take_census
from sandbox.health.processes import real_uid, snapshot
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.layers.folder import FOLDER, remove_tree
from sandbox.layers.forking import fork
from sandbox.layers.types import Layer
from sandbox.pool.config import PoolConfig
from sandbox.pool.pool import SandboxPool
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, SandboxSpec
from tests.sandbox.layers.walks import shell

pytestmark = pytest.mark.anyio

NUM_WORKERS, NUM_STEPS, MOST_LAYERS = 4, 12, 6
SIZES = (MIB, MIB, 2 * MIB)
FAULTS = (SandboxDiedError, StartError)

Files = dict[str, str]
"""What a workspace holds: name and content."""


class World:
    """What is known to all workers."""

    def __init__(self, host: SandboxHost, pool: SandboxPool, jail: JailName, seed: int) -> None:
        self.host = host
        self.pool = pool
        self.jail = jail
        self.rng = random.Random(seed)
        self.layers: list[tuple[Layer, Files]] = []
        self.counts: dict[str, int] = {}

    def spec(self) -> SandboxSpec:
        """Small, of one of few sizes."""
        return SandboxSpec(
            jail=self.jail, limits=Limits(memory_bytes=24 * MIB, disk_bytes=self.rng.choice(SIZES), pids=16)
        )

    def count(self, what: str) -> None:
        """It has happened."""
        self.counts[what] = self.counts.get(what, 0) + 1


async def work(world: World) -> None:
    """One worker's life."""
    for _ in range(NUM_STEPS):
        base, files = world.rng.choice([(None, {}), *world.layers])
        try:
            async with open_sandbox(world, base) as box:
                await live_in(world, box, dict(files))
        except FAULTS:
            world.count("died")
        except LayerError:
            assert (base, files) not in world.layers, "only what was released is gone"
            world.count("gone")
        if len(world.layers) > MOST_LAYERS or (world.layers and world.rng.random() < 0.2):
            layer, _ = world.layers.pop(world.rng.randrange(len(world.layers)))
            await world.host.layers.release(layer)
            world.count("released")


@asynccontextmanager
async def open_sandbox(world: World, base: Layer | None) -> AsyncIterator[Sandbox]:
    """From the pool, or built for the purpose."""
    spec = world.spec()
    source = world.pool if world.rng.random() < 0.8 else world.host
    async with source.acquire(spec, base) as box:
        yield box


async def live_in(world: World, box: Sandbox, files: Files) -> None:
    """Looks, changes something, and does some of what can be done to a sandbox."""
    await look(world, box, files)
    for _ in range(world.rng.randrange(3)):
        await change(world, box, files)
    act = world.rng.choice(("seal", "seal", "fork", "cancel", "kill", "diff", "sleep", "close", "leave"))
    world.count(act)
    if act == "seal":
        world.layers.append((await box.seal(), dict(files)))
    elif act == "fork":
        async with fork(world.host, box) as child:
            await look(world, child, files)
            await change(world, child, dict(files))
    elif act == "cancel":
        with anyio.move_on_after(world.rng.choice((0, 0.001, 0.005))):
            layer = await box.seal()
            world.layers.append((layer, dict(files)))
        await look(world, box, files)
    elif act == "kill":
        kill_all_of(box.jail.host_uid, world.host)
        await box.run(Command(argv=("true",)))
        raise AssertionError("nobody was left to run that") if os.geteuid() == 0 else SandboxDiedError("not root")
    elif act == "diff":
        await box.diff()
    elif act == "sleep":
        await box.run(Command(argv=("sh", "-c", "sleep 1000 & echo 1 >left"), timeout_s=5))
    elif act == "close":
        box.close()


async def look(world: World, box: Sandbox, files: Files) -> None:
    """Is it what the model says, within its limits?"""
    text = "for f in *; do [ -f $f ] && echo $f $(cat $f); done; df -k /workspace | tail -1 | awk '{print $2}'"
    *lines, kibibytes = (await shell(box, text)).splitlines()
    assert dict(line.split(" ") for line in lines) == files
    assert int(kibibytes) * 1024 == box.spec.limits.disk_bytes


async def change(world: World, box: Sandbox, files: Files) -> None:
    """Writes a file, or deletes one."""
    name, content = f"f{world.rng.randrange(6)}", str(world.rng.randrange(10**6))
    if name in files and world.rng.random() < 0.4:
        await shell(box, f"rm {name}")
        del files[name]
    else:
        await box.write_file(name, content.encode())
        files[name] = content


def kill_all_of(uid: int, host: SandboxHost) -> None:
    """Kills a jail from outside: root's jails have uids of their own."""
    if os.geteuid() != 0:
        return
    for pid in snapshot():
        if real_uid(pid) == uid:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("copied", [False, True], ids=["under", "copied"])
@pytest.mark.parametrize("seed", range(2))
async def test_nothing_is_lost_mixed_up_or_left(jail: JailName, seed: int, copied: bool) -> None:
    own = Path(tempfile.mkdtemp(prefix="rollout-layers-"))
    own.chmod(0o755)  # noqa: ASYNC240
    try:
        async with SandboxHost.start(SandboxConfig(state_dir=str(own))) as host:
            if copied:
                host.layers.why_copied = "a test wants it so"
            async with SandboxPool.start(host, PoolConfig(max_leased=NUM_WORKERS, max_jails=2 * NUM_WORKERS)) as pool:
                world = World(host, pool, jail, seed)
                async with anyio.create_task_group() as group:
                    for _ in range(NUM_WORKERS):
                        group.start_soon(work, world)
                for layer, _ in world.layers:
                    await host.layers.release(layer)
            assert host.num_live == 0
            assert host.layers.store._pins == {}
            assert len(world.counts) > 7, world.counts
        assert take_census(own).directories == ()
        assert {path.name for path in (own / FOLDER).iterdir()} <= {".lock"}
    finally:
        remove_tree(own)
