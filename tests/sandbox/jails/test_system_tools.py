"""Jail tools that the system brings, beside those that come as wheels: the same sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, Limits, Reason, SandboxSpec

pytestmark = pytest.mark.anyio
SYSTEM_BWRAP = Path("/usr/bin/bwrap")
LOOK = """
set -e
grep -q '^CapEff:.0*$' /proc/self/status
grep -q '^Seccomp:.2$' /proc/self/status
echo data > /workspace/file
if (echo x > /usr/.probe) 2>/dev/null; then exit 9; fi
cat /workspace/file
"""


@pytest.fixture
def system_bwrap() -> str:
    """The distribution's bubblewrap."""
    if not SYSTEM_BWRAP.exists():
        pytest.skip(f"no {SYSTEM_BWRAP} here; as root scripts/test installs it (Debian: apt install bubblewrap)")
    return str(SYSTEM_BWRAP)


async def test_a_system_bubblewrap_builds_the_same_sandbox(system_bwrap: str, state_dir: Path) -> None:
    config = SandboxConfig(state_dir=str(state_dir), bwrap=system_bwrap)
    async with SandboxHost.start(config) as host, host.acquire(SandboxSpec()) as box:
        outcome = await box.run(Command(argv=("sh", "-c", LOOK)))
        assert outcome.ok, outcome
        assert outcome.stdout == b"data\n"
        late = await box.run(Command(argv=("sh", "-c", "sleep 60 & setsid sleep 60 & wait"), timeout_s=0.3))
        assert late.reason is Reason.TIMEOUT
        assert (await box.run(Command(argv=("sh", "-c", "kill -9 $$")))).reason is Reason.SIGNAL


async def test_a_system_bubblewrap_is_held_to_the_same_limits(system_bwrap: str, state_dir: Path) -> None:
    config = SandboxConfig(state_dir=str(state_dir), bwrap=system_bwrap)
    spec = SandboxSpec(limits=Limits(disk_bytes=1 << 20))
    async with SandboxHost.start(config) as host, host.acquire(spec) as box:
        full = await box.run(Command(argv=("dd", "if=/dev/zero", "of=/workspace/big", "bs=64k", "count=64")))
        assert full.reason is Reason.DISK
        assert (await box.run(Command(argv=("rm", "/workspace/big")))).ok
