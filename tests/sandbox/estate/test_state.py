"""The state directory: who lives keeps everything, who died leaves nothing."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.cgroup import files
from sandbox.cgroup.hierarchies import find_hierarchies
from sandbox.errors import CapabilityError, ConfigError
from sandbox.estate.stage import require_reachable
from sandbox.estate.state import claim_slot, destroy_cgroup, open_state_dir, reconcile, require_mapped
from sandbox.health.census import read_engines
from sandbox.host import SandboxConfig


def test_two_engines_get_different_slots_and_a_freed_one_is_given_out_again(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    first = claim_slot(tmp_path, 2)
    second = claim_slot(tmp_path, 2)
    assert first.number != second.number
    with pytest.raises(CapabilityError, match="engines use"):
        claim_slot(tmp_path, 2)
    first.close()
    again = claim_slot(tmp_path, 2)
    assert again.number == first.number
    again.close()
    second.close()


def test_reconciling_removes_what_the_dead_left_and_nothing_of_the_living(tmp_path: Path) -> None:
    (tmp_path / "engines").mkdir()
    left_by = {}
    for name in ("dead", "alive"):
        (tmp_path / name / "s0").mkdir(parents=True)  # plain directories stand in for empty cgroups
        left_by[name] = claim_slot(tmp_path, 4)
        left_by[name].record((str(tmp_path / name),))
    left_by["dead"].close()
    assert reconcile(tmp_path) == [str(tmp_path / "dead")]
    assert not (tmp_path / "dead").exists()
    assert (tmp_path / "alive" / "s0").exists()
    left_by["alive"].forget()
    left_by["alive"].close()
    assert reconcile(tmp_path) == []


def test_a_state_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="state_dir"):
        open_state_dir(tmp_path / "file" / "state")


def test_a_directory_that_was_there_keeps_its_mode_and_a_new_one_is_open_to_the_uids_of_sandboxes() -> None:
    known = tempfile.mkdtemp(prefix="rollout-state-")
    umask = os.umask(0o077)
    try:
        os.chmod(known, 0o1777)
        opened = open_state_dir(Path(known))
        assert stat.S_IMODE(opened.stat().st_mode) == 0o1777
        made = open_state_dir(Path(known) / "a" / "b")
        wanted = 0o755 if os.geteuid() == 0 else 0o700
        for folder in (opened / "bin", made.parent, made, made / "bin"):
            assert stat.S_IMODE(folder.stat().st_mode) == wanted
        os.chmod(made, 0o700)
        if os.geteuid() == 0:
            with pytest.raises(ConfigError, match="closed to other users"):
                open_state_dir(made)
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    finally:
        os.umask(umask)
        shutil.rmtree(known)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"pid": "x"}'], ids=["empty", "zeros", "nonsense"])
def test_a_record_that_a_power_cut_left_unreadable_is_a_dead_engines(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "engines").mkdir()
    slot = claim_slot(tmp_path, 1)
    slot.record_path.write_bytes(content)
    slot.close()
    assert [engine.alive for engine in read_engines(tmp_path, {})] == [False]
    again = claim_slot(tmp_path, 1)
    assert not again.record_path.exists()
    again.close()


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ENODEV])
def test_a_cgroup_that_somebody_else_removes_meanwhile_counts_as_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    (tmp_path / "engine").mkdir()

    def busy(directory: str) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), directory)

    def vanish(directory: str) -> None:
        os.rmdir(directory)
        raise OSError(error, os.strerror(error), directory)

    monkeypatch.setattr(files, "remove_tree", busy)
    monkeypatch.setattr(files, "kill_tree", vanish)
    destroy_cgroup(str(tmp_path / "engine"))
    (tmp_path / "engine").mkdir()
    monkeypatch.setattr(files, "remove_tree", vanish)
    destroy_cgroup(str(tmp_path / "engine"))


def test_a_directory_behind_a_closed_one_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "closed" / "state").mkdir(parents=True)
    os.chmod(tmp_path / "closed", 0o700)
    with pytest.raises(ConfigError, match="chmod o"):
        require_reachable(tmp_path / "closed" / "state")


def test_uids_that_this_namespace_does_not_have_are_refused_with_those_it_has() -> None:
    require_mapped("0 0 4294967295\n", 700_000, 16_384)
    with pytest.raises(ConfigError, match="0-65535"):
        require_mapped("0 100000 65536\n", 700_000, 16_384)


@pytest.mark.parametrize(
    ("field", "value"), [("max_sandboxes", 0), ("uid_base", 0), ("memory_bytes", 1), ("start_timeout_s", -1.0)]
)
def test_an_absurd_setting_is_a_config_error_that_names_it(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        SandboxConfig(**{field: value})  # type: ignore[arg-type]


def test_the_cgroups_of_this_process_are_found_in_both_generations() -> None:
    mounts = (
        "30 1 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "31 1 0:27 /docker/x /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 1 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    own = "4:memory:/a/b\n1:cpu,cpuacct:/docker/x/y\n0::/\n"
    places = find_hierarchies(mounts, own)
    assert places.v1 == {"memory": "/sys/fs/cgroup/memory/a/b", "cpu": "/sys/fs/cgroup/cpu/y"}
    assert places.v2 == "/sys/fs/cgroup/unified"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that other users can pass, as pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="rollout-state-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="environment: only root can give a directory away")
@pytest.mark.parametrize("part", ["", "bin", "engines", "images"])
def test_a_state_directory_that_another_user_could_change_is_refused(open_folder: Path, part: str) -> None:
    state = open_state_dir(open_folder / "state")
    (state / "images").mkdir(exist_ok=True)
    os.chown(state / part, 12_345, 12_345)
    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        open_state_dir(state)
    os.chown(state / part, 0, 0)
    (state / part).chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by other users"):
        open_state_dir(state)
    (state / part).chmod(0o755)
    assert open_state_dir(state) == state
