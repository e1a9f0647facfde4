"""Whether a base can lie under workspaces is tried, and said by the doctor; nothing depends on it but cost."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.health.capabilities import namespace_capabilities
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import JailName, SandboxSpec
from tests.sandbox.layers.walks import shell, walk

pytestmark = pytest.mark.anyio


@pytest.fixture
def foreign_disk() -> Iterator[Path]:
    """A directory on a file system whose mounts take no other ids: an overlay, as a container's root is."""
    if os.geteuid() != 0:
        pytest.skip("environment: only root can mount it")
    with tempfile.TemporaryDirectory(prefix="rollout-overlay-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        for name in ("lower", "upper", "work", "state"):
            (root / name).mkdir(mode=0o755)
        options = f"lowerdir={root}/lower,upperdir={root}/upper,workdir={root}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", root / "state"], check=True)
        yield root / "state"
        subprocess.run(["umount", root / "state"], check=True)


async def test_a_disk_whose_mounts_take_no_other_ids_is_found_out_and_bases_are_copied(
    foreign_disk: Path, jail: JailName
) -> None:
    row = next(row for row in namespace_capabilities(foreign_disk) if row.name == "shared bases")
    if row.ok:
        pytest.skip("environment: this kernel id-maps overlays too")
    assert "copied into each workspace" in row.detail
    assert "state directory" in row.remedy
    async with SandboxHost.start(SandboxConfig(state_dir=str(foreign_disk))) as host:
        spec = SandboxSpec(jail=jail)
        async with host.acquire(spec) as box:
            await shell(box, "mkdir d; echo 1 >d/f; chmod 500 d")
            seen, base = await walk(box), await box.seal()
        async with host.acquire(spec, base=base) as box:
            assert await walk(box) == seen
            assert await box.diff() == ()
        assert host.layers.why_copied
        assert host.layers.why_copied in row.detail


async def test_the_doctor_says_what_hosts_do(state_dir: Path) -> None:
    row = next(row for row in namespace_capabilities(state_dir) if row.name == "shared bases")
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        assert await host.layers.lie_under() == row.ok
