"""`gc` and `census` see layers as they are used: what has no user goes, then the longest unused over a size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from sandbox.errors import ExhaustedError
from sandbox.health.census import take_census
from sandbox.health.gc import collect
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.layers.folder import FOLDER, idents_in, remove_tree
from sandbox.layers.types import Layer
from sandbox.types import SandboxSpec
from tests.sandbox.layers.sealing_engine import ENGINE

pytestmark = pytest.mark.anyio

KEPT_BYTES = 100_000


@pytest.fixture
def own_dir() -> Iterator[Path]:
    """A state directory whose layers are this test's alone."""
    path = Path(tempfile.mkdtemp(prefix="rollout-layers-"))
    path.chmod(0o755)
    yield path
    remove_tree(path)


async def sealed(host: SandboxHost, name: str, base: Layer | None = None, *, keep: bool = True) -> Layer:
    """A layer with one file of some size."""
    async with host.acquire(SandboxSpec(), base=base) as box:
        await box.write_file(name, os.urandom(KEPT_BYTES))
        layer = await box.seal()
    if keep:
        await host.layers.keep(layer)
    return layer


def removed(own_dir: Path, max_bytes: int) -> list[str]:
    """Which layers `gc` removes; what others left elsewhere on this host is not this test's."""
    lines = collect(own_dir, max_layer_bytes=max_bytes).removed
    return [os.path.basename(line) for line in lines if f"{own_dir}/{FOLDER}" in line]


async def test_the_longest_unused_goes_first_and_what_is_in_use_stays(own_dir: Path) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(own_dir))) as host:
        layers = [await sealed(host, str(n)) for n in range(4)]
    root = own_dir / FOLDER
    for age, layer in zip((300, 400, 100, 200), layers, strict=True):
        os.utime(root / layer.ident / "lock", (age, age))
    assert removed(own_dir, 1 << 30) == []
    assert removed(own_dir, 2 * KEPT_BYTES + 50_000) == [layers[2].ident, layers[3].ident]
    async with SandboxHost.start(SandboxConfig(state_dir=str(own_dir))) as host:
        async with host.acquire(SandboxSpec(), base=layers[0]) as box:
            assert len(await box.read_file("0", KEPT_BYTES)) == KEPT_BYTES
            assert removed(own_dir, 0) == [layers[1].ident]
            assert idents_in(root) == [layers[0].ident]
            assert len(await box.read_file("0", KEPT_BYTES)) == KEPT_BYTES
        assert removed(own_dir, 0) == [layers[0].ident]
    assert idents_in(root) == []


async def test_a_base_stays_as_long_as_what_lies_over_it(own_dir: Path) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(own_dir))) as host:
        base = await sealed(host, "base", keep=False)
        over = await sealed(host, "over", base)
        other = await sealed(host, "other", base, keep=False)
    root = own_dir / FOLDER
    assert set(idents_in(root)) == {over.ident, *over.bases}, f"{other.ident} went with its engine"
    assert take_census(own_dir).directories == ()
    collect(own_dir)
    assert set(idents_in(root)) == {over.ident, *over.bases}
    async with SandboxHost.start(SandboxConfig(state_dir=str(own_dir))) as host:
        found = await host.layers.find(over.ident)
        async with host.acquire(SandboxSpec(), base=found) as box:
            assert len(await box.read_file("base", KEPT_BYTES)) == KEPT_BYTES
    collect(own_dir, max_layer_bytes=0)
    assert idents_in(root) == []


async def test_what_a_killed_engine_left_is_counted_and_removed_and_a_living_ones_is_not(own_dir: Path) -> None:
    process = await anyio.open_process([sys.executable, "-c", ENGINE, str(own_dir)], stderr=None)
    assert process.stdout is not None
    ident = (await process.stdout.receive()).decode().strip()
    assert take_census(own_dir).directories == ()
    assert removed(own_dir, 0) == []
    assert idents_in(own_dir / FOLDER) == [ident]
    process.kill()
    await process.aclose()
    left = take_census(own_dir).directories
    assert len(left) == 2, "a layer, and half a layer"
    command = [sys.executable, "-m", "rollout", "gc", "--state-dir", str(own_dir), "--json", "--max-layers", "1G"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: ASYNC221
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f"directories: {path}" for path in left} <= set(json.loads(done.stdout)["removed"])
    assert set(os.listdir(own_dir / FOLDER)) == {".lock"}


async def test_a_size_that_is_none_is_refused_by_name(own_dir: Path) -> None:
    command = [sys.executable, "-m", "rollout", "gc", "--state-dir", str(own_dir), "--max-layers", "much"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)  # noqa: ASYNC221
    assert done.returncode == 2
    assert "--max-layers" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="environment: only root can mount a small disk")
async def test_a_full_disk_is_said_by_its_type_and_leaves_nothing(own_dir: Path) -> None:
    folder = own_dir / FOLDER
    folder.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", folder], check=True)  # noqa: ASYNC221
    try:
        async with SandboxHost.start(SandboxConfig(state_dir=str(own_dir))) as host, host.acquire(SandboxSpec()) as box:
            await box.write_file("small", b"1")
            small = await box.seal()
            await box.write_file("large", bytes(range(256)) * 4 * 4096)
            with pytest.raises(ExhaustedError) as caught:
                await box.seal()
            assert caught.value.resource == "disk space"
            assert set(os.listdir(folder)) == {".lock", small.ident}
            assert len(await box.read_file("large", 1 << 23)) == 1 << 22
    finally:
        subprocess.run(["umount", folder], check=True)  # noqa: ASYNC221
