"""Cgroup v2 on a real kernel: whose limits hold, who is killed, what is counted, and what is left.

The virtual machine of `scripts/test-cgroup2` runs these as root, in a delegated subtree with all or some controllers,
in a container's cgroup namespace and without cgroups; on a host without cgroup v2 they are skipped.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.cgroup import files
from sandbox.cgroup.delegation import LEAF
from sandbox.cgroup.hierarchies import own_hierarchies
from sandbox.health.capabilities import cgroup_capability
from sandbox.health.census import engine_cgroups
from sandbox.health.doctor import examine
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, Outcome, Reason, SandboxSpec

pytestmark = pytest.mark.anyio
LIMITS = Limits(memory_bytes=64 * MIB, disk_bytes=16 * MIB, pids=16)
HOG = "x = bytearray(10**9)"
HOLD = "import sys, time; x = b'1' * (int(sys.argv[1]) << 20); open(sys.argv[2], 'w').close(); time.sleep(600)"


@pytest.fixture
async def host(state_dir: Path) -> AsyncIterator[SandboxHost]:
    """An engine on cgroup v2, with whatever controllers this user has."""
    places = own_hierarchies()
    if places.v1 or places.v2_mount is None:
        pytest.skip("this host has no pure cgroup v2 (scripts/test-cgroup2 makes one)")
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        if host.backend.name != "v2":
            pytest.skip(f"this user has no cgroup v2: {host.backend_reasons['v2']}")
        yield host


@pytest.fixture
def spec(jail: JailName) -> SandboxSpec:
    return SandboxSpec(limits=LIMITS, jail=jail)


@pytest.fixture
async def box(host: SandboxHost, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    async with host.acquire(spec) as box:
        yield box


def require(box: Sandbox, *limits: str) -> None:
    for limit in limits:
        if limit in box.unenforced:
            pytest.skip(f"this cgroup has no controller for {limit}")


async def sh(box: Sandbox, script: str, timeout_s: float = 60) -> Outcome:
    return await box.run(Command(argv=("sh", "-c", script), timeout_s=timeout_s))


async def python(box: Sandbox, code: str, *words: str, timeout_s: float = 60) -> Outcome:
    return await box.run(Command(argv=("python3", "-I", "-S", "-c", code, *words), timeout_s=timeout_s))


async def appears(box: Sandbox, name: str) -> None:
    assert (await sh(box, f"while ! [ -e {name} ]; do sleep 0.05; done")).ok


def top_of(host: SandboxHost) -> Path:
    """The cgroup of the one sandbox that there is."""
    (top,) = Path(host.backend.roots[0]).glob("s*")
    return top


def test_a_user_without_a_subtree_is_told_so_and_has_no_limits_by_cgroups() -> None:
    found = cgroup_capability()
    if found.ok or found.detail.startswith("v2; memory"):
        pytest.skip("this user has cgroups")
    assert found.remedy


async def test_limits_that_are_not_enforced_are_those_whose_controller_is_absent(
    host: SandboxHost, box: Sandbox
) -> None:
    controllers = files.read(f"{host.backend.roots[0]}/cgroup.subtree_control").split()
    limits = {"memory": "memory", "cpus": "cpu", "pids": "pids"}
    assert set(box.unenforced) - {"image_isolation"} == {name for name in limits if limits[name] not in controllers}
    if os.environ.get("ROLLOUT_TEST_PARTIAL"):
        assert controllers == ["memory", "pids"]
        assert "cpu" in host.backend_reasons["v2"]


async def test_the_engine_and_what_was_beside_it_are_in_a_leaf(host: SandboxHost, box: Sandbox) -> None:
    own = own_hierarchies()
    assert own.v2 is not None
    parent = Path(host.backend.roots[0]).parent
    if not (parent / "cgroup.type").exists():
        pytest.skip("the root of the tree may hold processes beside its children")
    assert Path(own.v2) == parent / LEAF
    assert (parent / "cgroup.procs").read_text() == ""
    assert (await sh(box, "true")).ok


async def test_out_of_memory_kills_the_hog_and_neither_its_neighbours_nor_the_agent(
    host: SandboxHost, box: Sandbox
) -> None:
    require(box, "memory")
    await sh(box, "sleep 600 &")
    async with box.start(Command(argv=("sleep", "600"))) as beside:
        hog = await python(box, HOG)
        assert (hog.reason, hog.usage.oom_kills) == (Reason.OOM, 1)
        # A victim's last allocations are let through, so that it can end.
        assert LIMITS.memory_bytes * 0.8 < hog.usage.peak_memory_bytes < LIMITS.memory_bytes + 2 * LIMITS.disk_bytes
        assert beside.running
    after = await sh(box, "ps ax -o comm= | grep -c sleep")
    assert (after.ok, after.stdout, after.usage.oom_kills) == (True, b"1\n", 0)
    assert (top_of(host) / "memory.oom.group").read_text() == "0\n"


async def test_a_workspace_full_of_data_costs_a_command_and_never_the_agent(box: Sandbox) -> None:
    require(box, "memory")
    assert (await sh(box, "head -c 15M /dev/zero > /workspace/data")).ok
    for _ in range(3):
        assert (await python(box, HOG)).reason is Reason.OOM
    assert (await sh(box, "rm /workspace/data")).ok


async def test_each_of_two_commands_at_once_has_its_own_peak_and_its_own_kills(box: Sandbox) -> None:
    require(box, "memory")
    async with box.start(Command(argv=("python3", "-I", "-S", "-c", HOLD, "30", "ready"), timeout_s=600)) as large:
        await appears(box, "ready")
        small = await sh(box, "true")
        assert small.usage.peak_scope == "command"
        assert small.usage.peak_memory_bytes < 16 * MIB
        assert (await python(box, HOG)).reason is Reason.OOM
        assert large.running
        await large.kill()
        held = await large.wait()
    assert (held.reason, held.usage.oom_kills) == (Reason.KILLED, 0)
    assert held.usage.peak_memory_bytes > 30 * MIB


async def test_swap_is_no_way_around_the_memory_limit(host: SandboxHost, box: Sandbox) -> None:
    require(box, "memory")
    assert (top_of(host) / "memory.swap.max").read_text() == "0\n"


async def test_refused_forks_are_named_in_the_command_that_was_refused(box: Sandbox) -> None:
    require(box, "pids")
    bomb = await sh(box, "for i in $(seq 40); do sleep 30 & done; wait", timeout_s=60)
    assert bomb.reason is Reason.PIDS
    assert (await sh(box, "exit 3")).reason is Reason.EXIT


async def test_cpu_time_counts_what_a_command_left_running_and_no_others(box: Sandbox) -> None:
    spin = "import time; e = time.process_time() + 0.4\nwhile time.process_time() < e: pass"
    orphan = await sh(
        box, f"(setsid python3 -I -S -c \"{spin}; open('spun', 'w')\" &); while ! [ -e spun ]; do sleep 0.1; done"
    )
    assert orphan.ok
    assert orphan.usage.cpu_s > 0.4
    assert (await sh(box, "sleep 0.2")).usage.cpu_s < orphan.usage.cpu_s


async def test_cpus_are_held(box: Sandbox, host: SandboxHost) -> None:
    require(box, "cpus")
    assert (top_of(host) / "cpu.max").read_text() == "100000 100000\n"
    used = {line.split()[0]: int(line.split()[1]) for line in (top_of(host) / "cpu.stat").read_text().splitlines()}
    await sh(box, "for i in 1 2 3 4; do while :; do :; done & done; sleep 2; kill $(jobs -p)")
    now = {line.split()[0]: int(line.split()[1]) for line in (top_of(host) / "cpu.stat").read_text().splitlines()}
    assert now["nr_throttled"] > used["nr_throttled"]


async def test_a_timeout_and_a_kill_empty_the_leaf_and_nothing_else(host: SandboxHost, box: Sandbox) -> None:
    await sh(box, "sleep 61 &")
    late = await sh(box, "(setsid sleep 62 &); sleep 63 & sleep 64", timeout_s=1)
    assert (late.reason, late.signal) == (Reason.TIMEOUT, 9)
    async with box.start(Command(argv=("sh", "-c", "(setsid sleep 62 &); sleep 63"), timeout_s=600)) as process:
        await process.kill()
        assert (await process.wait()).reason is Reason.KILLED
    assert (await sh(box, "ps ax -o args= | grep '^sleep'")).stdout == b"sleep 61\n"


async def test_leaves_are_removed_and_an_occupied_one_is_not_used_again(host: SandboxHost, box: Sandbox) -> None:
    commands = top_of(host)
    for _ in range(4):
        assert (await sh(box, "true")).ok
    assert list(commands.glob("c*/")) == []
    await sh(box, "sleep 600 &")
    (occupied,) = commands.glob("c*/")
    assert (await sh(box, "cat /proc/self/cgroup")).ok
    assert list(commands.glob("c*/")) == [occupied]


async def test_a_set_serves_the_next_sandbox_whole(host: SandboxHost, spec: SandboxSpec) -> None:
    tops = []
    for _ in range(3):
        async with host.acquire(spec) as box:
            tops.append(top_of(host))
            assert (await sh(box, "sleep 600 & exit 4")).exit_code == 4
            if "memory" not in box.unenforced:
                assert (await python(box, HOG)).reason is Reason.OOM
    assert len(set(tops)) == 1
    assert (tops[0] / "cgroup.events").read_text().startswith("populated 0")


async def test_dead_leaves_do_not_pile_up_in_the_kernel(host: SandboxHost, box: Sandbox) -> None:
    require(box, "memory")
    for number in range(12):
        assert (await sh(box, f"cat /usr/bin/[a-c]* > /dev/null; echo {number} > f{number % 3}")).ok
    stat = dict(line.split() for line in (top_of(host) / "cgroup.stat").read_text().splitlines())
    assert int(stat["nr_dying_descendants"]) <= 6  # of whom the kernel still has a page: image files, the workspace's


async def test_all_sandboxes_together_have_caps(host: SandboxHost) -> None:
    root = Path(host.backend.roots[0])
    for name, limit in (("memory.max", "memory"), ("pids.max", "pids")):
        if limit not in host.unenforced:
            assert int((root / name).read_text()) > 0


async def test_nothing_is_left_of_an_engine(state_dir: Path, host: SandboxHost, box: Sandbox) -> None:
    await sh(box, "sleep 600 &")
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as other:
        assert other.backend.note == ""
        async with other.acquire(SandboxSpec(limits=LIMITS)) as second:
            assert (await sh(second, "true")).ok
    assert not set(other.backend.roots) & set(engine_cgroups())
    assert (await sh(box, "true")).ok


async def test_the_doctor_says_what_holds(state_dir: Path, host: SandboxHost) -> None:
    report = await examine(state_dir)
    assert report.isolates, report.failure
    assert report.backend.startswith("cgroup v2")
    limits = {limit.name: limit for limit in report.limits}
    for name in ("memory", "cpus", "pids"):
        assert limits[name].enforced is (name not in host.unenforced)
        assert limits[name].enforced or "no controller" in limits[name].how
        assert limits[name].enforced or "Delegate=" in limits[name].remedy
