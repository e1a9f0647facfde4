"""Sandboxes stay on their processors, whatever runs inside."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sandbox.cgroup import files
from sandbox.cgroup.hierarchies import own_hierarchies
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, JailName, SandboxSpec

LAST = max(os.sched_getaffinity(0))
PROBE = """
import os
print(sorted(os.sched_getaffinity(0)))
try:
    os.sched_setaffinity(0, range(os.cpu_count()))
except OSError:
    pass
print(sorted(os.sched_getaffinity(0)))
"""


@pytest.mark.anyio
async def test_code_cannot_leave_its_processors_where_the_host_can_hold_it(state_dir: Path, jail: JailName) -> None:
    config = SandboxConfig(state_dir=str(state_dir), cpu_set=str(LAST), cpu_weight=50)
    engine = sorted(os.sched_getaffinity(0))
    async with SandboxHost.start(config) as host:
        async with host.acquire(SandboxSpec(image="python", jail=jail)) as box:
            outcome = await box.run(Command(argv=("python3", "-I", "-S", "-c", PROBE)))
        begun, widened = outcome.stdout.decode().splitlines()
        roots = [*host.backend.roots, *host._cores.roots]
        if "cpu_set" not in host.unpinned:
            assert widened == f"[{LAST}]", host.unpinned
        assert begun == f"[{LAST}]"
        if host.backend.name == "hybrid":
            assert "cpu_weight" not in host.unpinned
            assert files.read(f"{host.backend.roots[3]}/cpu.shares") == "512\n"
    assert not any(map(os.path.exists, roots))
    assert sorted(os.sched_getaffinity(0)) == engine


@pytest.mark.anyio
async def test_where_no_cgroup_holds_them_they_begin_there_and_the_host_says_so(state_dir: Path) -> None:
    config = SandboxConfig(state_dir=str(state_dir), cpu_set=str(LAST), cpu_weight=50, cgroup_backend="none")
    async with SandboxHost.start(config) as host:
        if own_hierarchies().cpuset is None:
            assert "cpu_set: " in host.unpinned
        assert "cpu_weight: no cgroup with a weight" in host.unpinned
        async with host.acquire(SandboxSpec(image="python")) as box:
            outcome = await box.run(Command(argv=("python3", "-I", "-S", "-c", PROBE)))
        assert outcome.stdout.decode().splitlines()[0] == f"[{LAST}]"


def test_without_privileges_they_begin_there_and_the_host_says_so(
    unprivileged: tuple[list[str], dict[str, str], Path],
) -> None:
    words, env, own = unprivileged
    script = f"""
import anyio
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, SandboxSpec

async def main():
    async with SandboxHost.start(SandboxConfig(state_dir={str(own / "pinned")!r}, cpu_set="{LAST}")) as host:
        async with host.acquire(SandboxSpec()) as box:
            outcome = await box.run(Command(argv=("grep", "Cpus_allowed_list", "/proc/self/status")))
        print(outcome.stdout.decode().split()[-1], "|", host.unpinned)

anyio.run(main)
"""
    done = subprocess.run([*words, "-c", script], env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    begun, _, why = done.stdout.partition("|")
    assert begun.strip() == str(LAST)
    assert why.strip().startswith("cpu_set: ") or Path("/sys/fs/cgroup/cgroup.controllers").exists(), why
