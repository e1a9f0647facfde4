"""What the cgroup backends plan, on paper: order, caps, and leaves that are never shared while occupied."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.cgroup import files, swap, unified
from sandbox.cgroup.delegation import CONTROLLERS, LEAF, Claim, Delegation, find
from sandbox.cgroup.hierarchies import Hierarchies
from sandbox.cgroup.hybrid import HybridBackend
from sandbox.cgroup.leaves import Leaves
from sandbox.cgroup.pool import SetPool
from sandbox.cgroup.types import CgroupPlan, Live
from sandbox.cgroup.unified import UnifiedBackend, UnifiedSet
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


def test_a_leaf_that_has_emptied_is_lent_again_before_one_more_is_made(tmp_path: Path) -> None:
    leaves = Leaves(str(tmp_path), reuse=True)
    made = [leaves.first()]
    leaves.take()
    for _ in range(9):
        make_leaf(made[-1], populated=1)
        leaves.give_back(made[-1])
        made.append(leaves.take())
    make_leaf(made[8], populated=0)
    assert made[8] in [leaves.take() for _ in range(3)]


def test_a_leaf_that_cannot_be_read_is_looked_at_again(tmp_path: Path) -> None:
    leaves = Leaves(str(tmp_path), reuse=True)
    first = leaves.first()
    leaves.take()
    with pytest.raises(FileNotFoundError):
        leaves.give_back(first)
    make_leaf(first, populated=0)
    assert leaves.take() == first


def test_a_set_has_its_caps_before_anything_joins_and_agents_are_elsewhere() -> None:
    backend = HybridBackend({name: f"/{name}" for name in ("memory", "pids", "cpu", "v2")}, "e")
    cgroups = backend.new_set(3, LIMITS)
    writes = dict(cgroups.start_plan().write)
    assert int(writes["/memory/rollout-e/s3/memory.limit_in_bytes"]) == 110 * MIB
    assert writes["/pids/rollout-e/s3/pids.max"] == "8"
    assert writes["/cpu/rollout-e/s3/cpu.cfs_quota_us"] == "150000"
    leaf = cgroups.take_leaf()
    assert leaf is not None
    joined = cgroups.join_files(leaf)
    assert joined == (
        *(f"/{name}/rollout-e/s3/cgroup.procs" for name in ("memory", "pids", "cpu")),
        f"{leaf}/cgroup.procs",
    )
    assert backend.agents == tuple(f"/{name}/rollout-e/agents/cgroup.procs" for name in ("memory", "pids", "cpu", "v2"))
    assert backend.roots[0] == "/v2/rollout-e"


def test_a_set_that_is_used_again_needs_nothing() -> None:
    backend = HybridBackend({name: f"/{name}" for name in ("memory", "pids", "cpu", "v2")}, "e")
    cgroups = backend.new_set(0, LIMITS)
    assert cgroups.start_plan().make
    assert cgroups.start_plan() == CgroupPlan()


def test_free_sets_are_bounded_and_serve_only_their_own_limits() -> None:
    backend = HybridBackend({name: f"/{name}" for name in ("memory", "pids", "cpu", "v2")}, "e")
    pool = SetPool(backend, max_free=2)
    other = Limits(pids=9)
    first, second, third = pool.take(LIMITS), pool.take(LIMITS), pool.take(other)
    for cgroups in (first, second):
        assert pool.promise(LIMITS) == ()
        pool.put(LIMITS, cgroups)
    assert pool.promise(LIMITS) is None
    assert pool.promise(other) == first.remove_paths()
    pool.put(other, third)
    assert pool.take(LIMITS) is second
    assert pool.take(other) is third
    assert pool.take(other) not in (first, second, third)


def test_swap_that_is_on_and_not_counted_is_a_hole_in_the_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swaps = tmp_path / "swaps"
    assert not swap.in_use(swaps)
    swaps.write_text("Filename Type Size Used Priority\n")
    assert not swap.in_use(swaps)
    swaps.write_text("Filename Type Size Used Priority\n/dev/vda2 partition 1 0 -2\n")
    assert swap.in_use(swaps)
    for name in ("memory", "pids", "cpu", "v2"):
        (tmp_path / name).mkdir()
    delegation = Delegation(str(tmp_path), CONTROLLERS, is_host_root=True)
    monkeypatch.setattr(files, "write", lambda path, value: None)
    monkeypatch.setattr(unified, "claim", lambda delegation: Claim(CONTROLLERS, 0))
    monkeypatch.setattr(unified.os.path, "exists", lambda path: path.endswith("cgroup.kill"))
    for on in (True, False):
        monkeypatch.setattr(swap, "in_use", lambda on=on: on)
        hybrid = HybridBackend({name: str(tmp_path / name) for name in ("memory", "pids", "cpu", "v2")}, f"e{on}")
        for backend in (hybrid, UnifiedBackend(delegation, f"u{on}")):
            backend.open(1, 1, 1)
            assert backend.enforced == {"memory": not on, "cpus": True, "pids": True, "disk": True}
            assert ("swapaccount" in backend.gap) is on


def test_sets_that_come_back_together_share_out_the_free_places() -> None:
    pool = SetPool(HybridBackend({name: f"/{name}" for name in ("memory", "pids", "cpu", "v2")}, "e"), max_free=2)
    sets = [pool.take(LIMITS) for _ in range(3)]
    assert [pool.promise(LIMITS) for _ in sets] == [(), (), None]
    pool.put(LIMITS, sets[0])
    pool.forgo()
    assert pool.promise(LIMITS) == ()
    pool.put(LIMITS, sets[1])
    assert pool.promise(LIMITS) is None


def test_limits_that_nobody_uses_any_more_leave_nothing_in_the_pool() -> None:
    pool = SetPool(HybridBackend({name: f"/{name}" for name in ("memory", "pids", "cpu", "v2")}, "e"), max_free=4)
    for pids in range(2, 50):
        cgroups = pool.take(Limits(pids=pids))
        assert pool.promise(Limits(pids=pids)) is not None
        pool.put(Limits(pids=pids), cgroups)
    assert len(pool._free) == 4


def make_tree(directory: Path, controllers: str) -> Path:
    """What a delegated cgroup looks like, as far as ordinary files can tell."""
    directory.mkdir(exist_ok=True)
    (directory / "cgroup.controllers").write_text(controllers)
    for name in ("cgroup.type", "cgroup.procs", "cgroup.subtree_control"):
        (directory / name).write_text("")
    return directory


def unified_set(root: str, controllers: tuple[str, ...] = CONTROLLERS) -> UnifiedSet:
    return UnifiedSet(root, 0, LIMITS, controllers, refusals_are_local=True)


def test_in_cgroup_v2_processes_live_in_leaves_only_and_agents_are_elsewhere() -> None:
    cgroups = unified_set("/e")
    plan = cgroups.start_plan()
    assert plan.make == ("/e/s0", "/e/s0/c0")
    writes = dict(plan.write)
    assert int(writes["/e/s0/memory.max"]) == 110 * MIB
    assert writes["/e/s0/cgroup.subtree_control"] == "+memory +pids"
    leaf = cgroups.take_leaf()
    assert leaf == "/e/s0/c0"
    assert cgroups.join_files(leaf) == (f"{leaf}/cgroup.procs",)
    assert cgroups.kill_file() == "/e/s0/cgroup.kill"
    backend = UnifiedBackend(Delegation("/p", CONTROLLERS, is_host_root=True), "e")
    assert backend.agents == ("/p/rollout-e/agents/cgroup.procs",)


@pytest.mark.parametrize("absent", CONTROLLERS)
def test_in_cgroup_v2_nothing_is_asked_of_a_controller_that_is_not_there(absent: str) -> None:
    there = tuple(name for name in CONTROLLERS if name != absent)
    text = repr(unified_set("/e", there).start_plan())
    assert absent not in text
    assert all(name in text for name in there)


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
    cgroups = unified_set(str(tmp_path))
    top = tmp_path / "s0"
    top.mkdir(parents=True)
    (top / "memory.current").write_text("5000\n")
    (top / "memory.peak").write_text("9000\n")
    (top / "pids.current").write_text("4\n")
    (top / "cpu.stat").write_text("usage_usec 1000\nuser_usec 600\n")
    cgroups.begin()
    (top / "cpu.stat").write_text("usage_usec 3500\nuser_usec 600\n")
    assert cgroups.live() == Live(memory_bytes=5000, peak_memory_bytes=9000, cpu_us=2500, pids=4)
    cgroups.begin()
    assert cgroups.live() == Live(memory_bytes=5000, peak_memory_bytes=None, cpu_us=0, pids=4)


def test_a_subtree_is_divided_where_its_files_may_be_written(tmp_path: Path) -> None:
    own = make_tree(make_tree(tmp_path / "mount", "") / "own", "cpuset cpu io memory pids")
    places = Hierarchies({}, str(own), str(own.parent))
    assert find(places) == Delegation(str(own), CONTROLLERS, False)
    leaf = make_tree(own / LEAF, "")
    assert find(Hierarchies({}, str(leaf), str(own.parent))) == find(places)  # as a second engine finds itself


def test_a_subtree_with_some_controllers_says_which_it_lacks(tmp_path: Path) -> None:
    place = find(Hierarchies({}, str(make_tree(tmp_path / "own", "memory pids")), str(tmp_path / "own")))
    assert isinstance(place, Delegation)
    assert (place.controllers, place.absent) == (("memory", "pids"), ("cpu",))
    nothing = find(Hierarchies({}, str(make_tree(tmp_path / "own", "io")), str(tmp_path / "own")))
    assert nothing == f"{tmp_path}/own has no controller of memory, pids, cpu"


def test_a_cgroup_of_somebody_else_is_not_divided(tmp_path: Path) -> None:
    make_tree(tmp_path, "memory")
    absent = find(Hierarchies({}, str(tmp_path / "absent"), str(tmp_path)))
    assert isinstance(absent, str)
    assert absent.startswith(f"{tmp_path}/absent is ")
    assert "outside" in str(find(Hierarchies({}, None, str(tmp_path))))
    assert find(Hierarchies({}, None, None)) == "no cgroup v2 tree"
