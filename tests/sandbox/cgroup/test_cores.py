"""Sets of processors and weights, on a tree of plain files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.cgroup.cores import Cores, format_cpu_set, parse_cpu_set
from sandbox.cgroup.hierarchies import Hierarchies, find_hierarchies
from sandbox.errors import ConfigError
from sandbox.host import SandboxConfig

EIGHT = frozenset(range(8))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3", (0, 1, 2, 3)), ("5,1-2", (1, 2, 5)), ("3,3,2-4", (2, 3, 4)), ("0-7", tuple(range(8)))],
)
def test_a_list_of_processors_is_understood(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_set("f", text, EIGHT) == cpus


@pytest.mark.parametrize(
    "text", ["", " ", "a", "-1", "1-", "3-1", "8", "0-8", "0-999999", "1,,2", "0 1", "1;2", "0x1", "9" * 20]
)
def test_a_bad_list_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^sandbox\.cpu_set = "):
        parse_cpu_set("sandbox.cpu_set", text, EIGHT)


def test_a_processor_that_this_process_may_not_use_is_refused_with_those_that_it_may() -> None:
    with pytest.raises(ConfigError, match="may use the processors 0-1,4-5"):
        parse_cpu_set("f", "0-5", frozenset({0, 1, 4, 5}))


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_list_that_is_written_is_read_as_the_same(cpus: set[int]) -> None:
    assert parse_cpu_set("f", format_cpu_set(frozenset(cpus)), frozenset(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"cpu_set": "x"}, "cpu_set"), ({"cpu_set": "99999"}, "cpu_set"), ({"cpu_weight": 0}, "cpu_weight")],
)
def test_settings_are_checked_when_they_are_made(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^sandbox\.{field} = "):
        SandboxConfig(**fields)  # type: ignore[arg-type]


def places(cpuset: Path | None = None) -> Hierarchies:
    return Hierarchies({}, None, None, None if cpuset is None else str(cpuset))


def test_a_v1_hierarchy_gets_a_directory_that_jails_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuset.effective_mems").write_text("0\n")
    cores = Cores((2, 3), None, places(tmp_path), "1-9")
    own = tmp_path / "rollout-1-9"
    assert cores.roots == (str(own),)

    make_directory = os.mkdir

    def make_cgroup(path: str) -> None:
        make_directory(path)
        for name in ("cpuset.mems", "cpuset.cpus"):
            Path(path, name).touch()

    monkeypatch.setattr("sandbox.cgroup.cores.os.mkdir", make_cgroup)
    gap = cores.open(())
    assert ((own / "cpuset.mems").read_text(), (own / "cpuset.cpus").read_text()) == ("0", "2-3")
    assert cores.join == (f"{own}/cgroup.procs",)
    assert gap == ""


def test_what_the_host_refuses_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "cpuset.effective_mems").write_text("0\n")
    cores = Cores((0,), 50, places(tmp_path), "1-9")
    gap = cores.open(())
    assert "cpu_set: " in gap
    assert "cpu_weight: no cgroup with a weight" in gap
    assert cores.roots == cores.join == ()
    assert not (tmp_path / "rollout-1-9").exists()


@pytest.mark.parametrize(("name", "value"), [("cpu.weight", "50"), ("cpu.shares", "512")])
def test_the_weight_is_written_in_the_words_of_the_version(tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / name).touch()
    cores = Cores(None, 50, places(), "1-9")
    gap = cores.open((str(tmp_path),))
    assert (tmp_path / name).read_text() == value
    assert gap == ""


def test_version_2_is_pinned_through_its_controller(tmp_path: Path) -> None:
    root = tmp_path / "rollout-1-9"
    root.mkdir()
    for path in (root / "cgroup.controllers", root / "cpuset.cpus", tmp_path / "cgroup.subtree_control"):
        path.touch()
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    cores = Cores((1,), None, places(), "1-9")
    gap = cores.open((str(root),))
    assert (root / "cpuset.cpus").read_text() == "1"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpuset"
    assert gap == ""
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    gap = cores.open((str(root),))
    assert "has no controller cpuset" in gap


def test_without_a_wish_nothing_is_done() -> None:
    cores = Cores(None, None, places(Path("/nowhere")), "1-9")
    gap = cores.open(("/nowhere",))
    assert (cores.roots, cores.join, gap) == ((), (), "")


def test_the_cpuset_hierarchy_is_found() -> None:
    mountinfo = "30 20 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    assert find_hierarchies(mountinfo, "3:cpuset:/a\n").cpuset == "/sys/fs/cgroup/cpuset/a"
    assert find_hierarchies("", "").cpuset is None
