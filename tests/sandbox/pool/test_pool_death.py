"""An engine that is killed leaves nothing of its pool: neither idle jails nor leased ones, nor what they run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.estate.state import reconcile
from sandbox.health.census import take_census
from sandbox.health.processes import snapshot, with_descendants
from sandbox.types import JailName
from tests.sandbox.conftest import REPOSITORY
from tests.sandbox.waiting import wait_until

ENGINE = """
import sys
import anyio
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.pool.config import PoolConfig, Warm
from sandbox.pool.pool import SandboxPool
from sandbox.types import Command, SandboxSpec

async def main(state_dir, jail):
    config = PoolConfig(max_leased=8, warm=(Warm(count=4, jail=jail),))
    async with SandboxHost.start(SandboxConfig(state_dir=state_dir)) as host, SandboxPool.start(host, config) as pool:
        while pool.statistics().warm < 4:
            await anyio.sleep(0.01)
        spec = SandboxSpec(jail=jail)
        async with pool.acquire(spec) as box, pool.acquire(spec) as other:
            await box.run(Command(argv=("sh", "-c", "sleep 1000 & (setsid sleep 1000 &)")))
            shares = pool.share(other, 1000)
            print(host._warden.pid, flush=True)
            await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:])
"""


@pytest.fixture
def own_state_dir() -> Iterator[Path]:
    """A state directory that no other engine uses."""
    path = Path(tempfile.mkdtemp(prefix="rollout-pool-death-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("victims", ["the engine", "the engine and its warden"])
def test_an_engine_that_is_killed_leaves_nothing_of_its_pool(own_state_dir: Path, jail: JailName, victims: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}
    words = [sys.executable, "-c", ENGINE, str(own_state_dir), jail]
    warden = 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=env, text=True) as engine:
        try:
            assert engine.stdout is not None
            warden = int(engine.stdout.readline())
            below = {(info.pid, info.started) for info in with_descendants([warden], snapshot())}
            assert len(below) >= 1 + 4
        finally:
            if warden and victims == "the engine and its warden":
                os.kill(warden, signal.SIGKILL)
            engine.kill()
    wait_until(lambda: not below & {(info.pid, info.started) for info in snapshot().values()})
    if victims == "the engine and its warden":
        reconcile(own_state_dir)  # as the next engine does
    wait_until(lambda: not left(own_state_dir, engine.pid))


def left(state_dir: Path, engine: int) -> list[str]:
    """What is still there of it."""
    census = take_census(state_dir)
    cgroups = [path for path in census.cgroups if path.endswith(f"-{engine}")]
    return [*census.dead_engines, *census.processes, *census.mounts, *cgroups]
