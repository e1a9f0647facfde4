"""What the cgroup backends plan, on paper: order, caps, and leaves that are never shared while occupied."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.cgroup.hybrid import HybridBackend
from sandbox.cgroup.leaves import Leaves
from sandbox.cgroup.pool import SetPool
from sandbox.cgroup.types import Live
from sandbox.cgroup.unified import UnifiedBackend
from sandbox.types import MIB, Limits

LIMITS = Limits(memory_bytes=100 * MIB, disk_bytes=10 * MIB, pids=8, cpus=1.5)


def make_leaf(leaf: str, *, populated: int) -> None:
    Path(leaf).mkdir(exist_ok=True, parents=True)
    Path(leaf, "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")


def test_an_occupied_leaf_is_set_aside_until_it_is_empty(tmp_path: Path) -> None:
    leaves = Leaves(str(tmp_path), reuse=True)
    first = leaves.first()
    assert leaves.take() == first
    make_leaf(first, populated=1)
    leaves.give_back(first)
    second = leaves.take()
    assert second != first
    assert not leaves.idle()
    make_leaf(first, populated=0)
    assert leaves.idle()
    assert leaves.take() == first


def test_a_sandbox_is_capped_before_anything_joins_and_commands_have_less_than_the_agent() -> None:
    backend = HybridBackend({name: f"/{name}" for name in ("memory", "pids", "cpu", "v2")}, "e")
    plan = backend.new_set(3, LIMITS).start_plan()
    writes = dict(plan.write)
    commands = int(writes["/memory/rollout-e/s3/c/memory.limit_in_bytes"])
    assert commands == 110 * MIB
    assert int(writes["/memory/rollout-e/s3/memory.limit_in_bytes"]) > commands
    assert writes["/cpu/rollout-e/s3/cpu.cfs_quota_us"] == "150000"
    assert plan.join == tuple(f"/{name}/rollout-e/s3/cgroup.procs" for name in ("v2", "memory", "pids", "cpu"))
    assert backend.roots[0] == "/v2/rollout-e"


def test_a_set_that_is_used_again_only_joins() -> None:
    backend = HybridBackend({name: f"/{name}" for name in ("memory", "pids", "cpu", "v2")}, "e")
    cgroups = backend.new_set(0, LIMITS)
    first, again = cgroups.start_plan(), cgroups.start_plan()
    assert again.join == first.join
    assert (again.make, again.write) == ((), ())


def test_free_sets_are_bounded_and_serve_only_their_own_limits() -> None:
    backend = HybridBackend({name: f"/{name}" for name in ("memory", "pids", "cpu", "v2")}, "e")
    pool = SetPool(backend, max_free=2)
    other = Limits(pids=9)
    first, second, third = pool.take(LIMITS), pool.take(LIMITS), pool.take(other)
    for cgroups in (first, second):
        assert pool.make_room(LIMITS) == ()
        pool.put(LIMITS, cgroups)
    assert not pool.has_room()
    assert pool.make_room(other) == first.remove_paths()
    pool.put(other, third)
    assert pool.take(LIMITS) is second
    assert pool.take(other) is third
    assert pool.take(other) not in (first, second, third)


def test_in_cgroup_v2_processes_live_in_leaves_only(tmp_path: Path) -> None:
    backend = UnifiedBackend(str(tmp_path), "e")
    cgroups = backend.new_set(0, LIMITS)
    plan = cgroups.start_plan()
    top = f"{tmp_path}/rollout-e/s0"
    assert plan.make[0] == top
    assert plan.join == (f"{top}/agent/cgroup.procs",)
    assert plan.write[-1][0].endswith(("subtree_control", "swap.max"))
    leaf = cgroups.take_leaf()
    assert leaf is not None
    assert cgroups.join_files(leaf) == (f"{leaf}/cgroup.procs",)
    assert cgroups.kill_file() == f"{top}/cgroup.kill"


@pytest.mark.parametrize("populated", [0, 1])
def test_in_cgroup_v2_every_command_gets_a_fresh_leaf(tmp_path: Path, populated: int) -> None:
    leaves = Leaves(str(tmp_path), reuse=False)
    first = leaves.first()
    assert leaves.take() == first
    Path(first).mkdir()
    events = Path(first, "cgroup.events")
    events.write_text(f"populated {populated}\n")
    if populated:
        leaves.give_back(first)
        assert Path(first).exists()
    assert leaves.take() != first


def test_what_a_sandbox_of_cgroup_v2_holds_is_its_own_and_not_its_predecessors(tmp_path: Path) -> None:
    cgroups = UnifiedBackend(str(tmp_path), "e").new_set(0, LIMITS)
    top = tmp_path / "rollout-e" / "s0"
    top.mkdir(parents=True)
    (top / "memory.current").write_text("5000\n")
    (top / "memory.peak").write_text("9000\n")
    (top / "pids.current").write_text("4\n")
    (top / "cpu.stat").write_text("usage_usec 1000\nuser_usec 600\n")
    cgroups.begin()
    (top / "cpu.stat").write_text("usage_usec 3500\nuser_usec 600\n")
    assert cgroups.live() == Live(memory_bytes=5000, peak_memory_bytes=9000, cpu_us=2500, pids=3)
    cgroups.begin()
    assert cgroups.live() == Live(memory_bytes=5000, peak_memory_bytes=None, cpu_us=0, pids=3)
