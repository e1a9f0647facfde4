"""Host uids: no two engines of this host share one, and none belongs to somebody else."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.errors import CapabilityError, ConfigError
from sandbox.estate import uids
from sandbox.estate.uids import check_unused, claim_uids, claims_dir
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, SandboxSpec

EACH = 16_384


def test_engines_get_different_blocks_and_a_freed_one_is_given_out_again(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    first = claim_uids(700_000, 2 * EACH, EACH, 0, directory=directory)
    second = claim_uids(700_000, 2 * EACH, EACH, 0, directory=directory)
    assert (first.uids, second.uids) == (range(700_000, 716_384), range(716_384, 732_768))
    with pytest.raises(CapabilityError, match="uid_base"):
        claim_uids(700_000, 2 * EACH, EACH, 1, directory=directory)
    first.close()
    first.close()
    again = claim_uids(700_000, 2 * EACH, EACH, 1, directory=directory)
    assert again.block == 0
    again.close()
    second.close()


def test_ranges_that_overlap_only_in_part_are_never_held_together(tmp_path: Path) -> None:
    held = claim_uids(700_000, EACH, EACH, 0, directory=tmp_path)
    beside = claim_uids(700_000 + EACH // 2, 2 * EACH, EACH, 0, directory=tmp_path)
    assert beside.block == 1
    assert not set(held.uids) & set(beside.uids)
    held.close()
    beside.close()


def test_a_claim_lasts_as_long_as_any_process_holds_its_lock(tmp_path: Path) -> None:
    claim = claim_uids(700_000, EACH, EACH, 0, directory=tmp_path)
    wardens = os.dup(claim.lock_fd)
    claim.close()
    with pytest.raises(CapabilityError, match="use all uids"):
        claim_uids(700_000, EACH, EACH, 0, directory=tmp_path)
    os.close(wardens)
    claim_uids(700_000, EACH, EACH, 0, directory=tmp_path).close()


def test_a_place_for_claims_that_others_can_write_to_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("open", "link", "file", "file/below"):
        with pytest.raises(CapabilityError, match="mode 0700"):
            claim_uids(700_000, EACH, EACH, 0, directory=tmp_path / name)


def test_a_users_claims_outlive_its_sessions_where_it_has_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = pwd.getpwuid(0)
    entry = pwd.struct_passwd((*account[:5], str(tmp_path), account[6]))
    monkeypatch.setattr(uids.pwd, "getpwuid", lambda uid: entry)
    monkeypatch.setattr(uids.os, "geteuid", lambda: 54_321)
    at_home = claims_dir()
    assert at_home.is_relative_to(tmp_path)
    monkeypatch.undo()
    claim_uids(700_000, EACH, EACH, 0, directory=at_home).close()
    assert stat.S_IMODE(at_home.stat().st_mode) == 0o700


def test_too_few_uids_for_one_engine_are_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="100 uids are too few"):
        claim_uids(700_000, 100, EACH, 0, directory=tmp_path)


@pytest.mark.parametrize(
    ("id_files", "accounts", "who"),
    [
        ({"/etc/subuid": "alice:100000:65536\nbob:710000:65536\n"}, [], "bob in /etc/subuid has 710000-775535"),
        ({"/etc/subgid": "alice:699999:2\n"}, [], "alice in /etc/subgid has 699999-700000"),
        ({}, [("user eve", 700_000 + EACH - 1)], "user eve has 716383-716383"),
    ],
)
def test_uids_of_somebody_else_are_a_config_error_that_names_a_free_base(
    id_files: dict[str, str], accounts: list[tuple[str, int]], who: str
) -> None:
    with pytest.raises(ConfigError, match=who) as caught:
        check_unused(700_000, EACH, id_files, accounts)
    assert caught.value.field == "sandbox.uid_base"
    assert caught.value.value == 700_000
    free = int(caught.value.remedy.rsplit(" ", 1)[1])
    check_unused(free, EACH, id_files, accounts)


def test_ranges_that_only_touch_are_no_clash_and_broken_lines_are_passed_over() -> None:
    texts = {"/etc/subuid": f"a:600000:100000\nb:{700_000 + EACH}:1\n# comment\nbroken:x:y\n\n"}
    check_unused(700_000, EACH, texts, [("user root", 0), ("user nobody", 65_534)])


@pytest.fixture
def second_state_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rollout-state-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.anyio
@pytest.mark.skipif(os.geteuid() != 0, reason="environment: only root has uids to give")
async def test_engines_with_different_state_directories_run_sandboxes_as_different_users(
    state_dir: Path, second_state_dir: Path
) -> None:
    uids = []
    for folder in (state_dir, second_state_dir):
        async with (
            SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host,
            SandboxHost.start(SandboxConfig(state_dir=str(folder))) as other,
        ):
            for engine in (host, other):
                async with engine.acquire(SandboxSpec()) as box, box.start(Command(argv=("sleep", "60"))):
                    assert engine._uids is not None
                    uids.append(engine._uids.start)
    assert len(uids) == 4
    assert uids[0] != uids[1]
    assert uids[2] != uids[3]


@pytest.mark.anyio
@pytest.mark.skipif(os.geteuid() != 0, reason="environment: only root has uids to give")
async def test_a_base_that_belongs_to_a_user_is_refused_before_anything_starts(state_dir: Path) -> None:
    config = SandboxConfig(state_dir=str(state_dir), uid_base=60_000)  # nobody's is 65534
    with pytest.raises(ConfigError, match="uid_base"):
        async with SandboxHost.start(config):
            pass
