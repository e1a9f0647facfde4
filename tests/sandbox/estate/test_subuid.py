"""An unprivileged user with subordinate uids: every sandbox gets a host uid of its own.

The account and its ranges exist in a mount namespace of the test alone; the host's own files are not changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import CapabilityError
from sandbox.estate.subuid import SubordinateIds, find_subordinate_ids, inner_uids, longest_range, require_open
from tests.sandbox.conftest import UNPRIVILEGED_UID
from tests.sandbox.estate.subordinates import enter_with_account

TWO_SANDBOXES = """
import json, os, sys
import anyio
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, SandboxSpec

async def main():
    spec = SandboxSpec(image="host", jail=sys.argv[2])
    config = SandboxConfig(state_dir=sys.argv[1])
    async with SandboxHost.start(config) as host, host.acquire(spec) as one, host.acquire(spec) as two:
        maps = []
        for box in (one, two):
            look = "cat /proc/self/uid_map && touch mine && stat -c %u mine"
            outcome = await box.run(Command(argv=("sh", "-c", look)))
            maps.append(outcome.stdout.decode().split())
            await box.write_file("a/b", b"data")
            assert await box.read_file("a/b", 10) == b"data"
        await one.run(Command(argv=("sh", "-c", "sleep 300 & setsid sleep 300 &")))
        left = await one.run(Command(argv=("sleep", "300"), timeout_s=0.2))
        print(json.dumps({"maps": maps, "shared": host.shared_uid, "reason": left.reason}), flush=True)
        if len(sys.argv) > 3:
            os.kill(os.getpid(), 9)

anyio.run(main, backend_options={"use_uvloop": True})
"""

A_BASE = """
import json, sys
import anyio
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, SandboxSpec

async def main():
    spec = SandboxSpec(jail=sys.argv[2])
    async with SandboxHost.start(SandboxConfig(state_dir=sys.argv[1])) as host:
        async with host.acquire(spec) as box:
            await box.run(Command(argv=("sh", "-c", "mkdir d; echo 1 >d/f; chmod 0 d; echo 2 >g; chmod 600 g")))
            base = await box.seal()
        async with host.acquire(spec, base=base) as box:
            look = "cat g; stat -c %a:%u d g; chmod 700 d; cat d/f; rm g"
            outcome = await box.run(Command(argv=("sh", "-c", look)))
            changes = [(change.path, change.kind) for change in await box.diff()]
            result = {"shared": host.shared_uid, "seen": outcome.stdout.decode().split(), "changes": changes}
            print(json.dumps({**result, "why": host.layers.why_copied}), flush=True)

anyio.run(main, backend_options={"use_uvloop": True})
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a user subordinate uids to try them")
Runner = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def as_worker(unprivileged: tuple[list[str], dict[str, str], Path], tmp_path: Path) -> Runner:
    """Runs a Python of the unprivileged user, who has an account and (unless told otherwise) subordinate ids."""
    words, env, home = unprivileged

    def run(*arguments: str, ranges: str = "worker:300000:65536\n") -> subprocess.CompletedProcess[str]:
        enter = enter_with_account(tmp_path, UNPRIVILEGED_UID, home, ranges)
        return subprocess.run(
            [*enter, *words, *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return result


@needs_root
def test_each_sandbox_of_an_unprivileged_engine_has_a_subordinate_uid(
    as_worker: Runner, unprivileged: tuple[list[str], dict[str, str], Path], jail: str
) -> None:
    found = _answer(as_worker("-c", TWO_SANDBOXES, str(unprivileged[2] / "state"), jail))

    assert found["shared"] == ""
    # Inside, the second column counts in the warden's own namespace: 0 there would be the engine's user.
    assert [entry[0] for entry in found["maps"]] == ["1000", "1000"]
    outer = {entry[1] for entry in found["maps"]}
    assert len(outer) == 2
    assert "0" not in outer
    assert all(entry[-1] == "1000" for entry in found["maps"])
    assert found["reason"] == "timeout"


@needs_root
def test_a_base_is_sealed_by_one_subordinate_uid_and_given_to_another(
    as_worker: Runner, unprivileged: tuple[list[str], dict[str, str], Path], jail: str
) -> None:
    found = _answer(as_worker("-c", A_BASE, str(unprivileged[2] / "state"), jail))

    assert found["shared"] == ""
    assert found["seen"] == ["2", "0:1000", "600:1000", "1"]
    assert found["changes"] == [["d", "changed"], ["g", "deleted"]]
    assert "root" in found["why"], "copied, and said why"


@needs_root
def test_a_killed_engine_leaves_none_of_its_subordinate_processes(
    as_worker: Runner, unprivileged: tuple[list[str], dict[str, str], Path]
) -> None:
    state = str(unprivileged[2] / "state")
    found = _answer(as_worker("-c", TWO_SANDBOXES, state, "bubblewrap", "die"))
    done = as_worker("-m", "rollout", "gc", "--state-dir", state)

    assert done.returncode == 0, done.stderr
    census = as_worker("-m", "rollout", "census", "--json", "--state-dir", state)
    left = json.loads(census.stdout)
    assert left["total"] == 0, (left, found)


@needs_root
def test_an_engine_without_a_range_shares_its_uid_and_the_doctor_says_why(
    as_worker: Runner, unprivileged: tuple[list[str], dict[str, str], Path]
) -> None:
    state = str(unprivileged[2] / "state")
    found = _answer(as_worker("-c", TWO_SANDBOXES, state, "bubblewrap", ranges="other:300000:65536\n"))
    assert "gives worker no range of ids" in found["shared"]
    assert {entry[1] for entry in found["maps"]} == {str(UNPRIVILEGED_UID)}

    report = json.loads(
        as_worker("-m", "rollout", "doctor", "--json", "--state-dir", state, ranges="worker:300000:10\n").stdout
    )
    row = next(entry for entry in report["capabilities"] if entry["name"] == "separate uids")
    assert not row["ok"]
    assert "too few" in row["detail"]
    assert "--add-subuids" in row["detail"]


def test_the_longest_range_of_the_user_counts_by_name_or_number() -> None:
    text = "other:1:99999\nworker:100000:65536\n12345:400000:131072\nworker:broken:1\nworker:1:2:3\n"
    assert longest_range(text, "worker", 12345) == (400000, 131072)
    assert longest_range(text, "nobody", 65534) is None


def test_engines_of_one_user_get_disjoint_parts_until_the_range_ends() -> None:
    ids = SubordinateIds(first_uid=100_000, first_gid=100_000, count=65_536)
    parts = [inner_uids(ids, slot, 16_384) for slot in range(4)]
    assert parts[0] == range(1, 16_385)
    assert parts[3][-1] == ids.count
    with pytest.raises(CapabilityError, match="too few for engine 5"):
        inner_uids(ids, 4, 16_384)


def test_a_user_without_an_account_or_a_range_is_told_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    with pytest.raises(CapabilityError, match="has no account"):
        find_subordinate_ids(uid=2_000_000_000)
    with pytest.raises(CapabilityError, match="usermod --add-subuids"):
        find_subordinate_ids(tmp_path / "absent", tmp_path / "absent", uid=0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(CapabilityError, match="apt install uidmap"):
        find_subordinate_ids()


def test_a_closed_directory_on_the_way_to_the_binaries_is_named(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(CapabilityError, match="closed to other uids") as raised:
        require_open(closed / "bin")
    assert "chmod o+x" in raised.value.remedy
