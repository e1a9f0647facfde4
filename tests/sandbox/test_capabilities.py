"""What a host can do is seen, not guessed, and what it cannot do comes with a remedy."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sandbox import capabilities, namespace_probe


def test_the_namespace_probe_leaves_the_mount_table_as_it_was() -> None:
    before = Path("/proc/self/mountinfo").read_text()
    found = capabilities.namespace_capabilities()
    assert Path("/proc/self/mountinfo").read_text() == before
    assert {capability.name for capability in found} >= {"user namespaces", "overlay mounts", "id-mapped mounts"}
    for capability in found:
        assert capability.ok or capability.remedy


def test_the_namespace_probe_runs_as_an_unprivileged_user(
    unprivileged: tuple[list[str], dict[str, str], Path],
) -> None:
    python, env, _ = unprivileged
    command = [*python, "-I", "-S", namespace_probe.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env=env)
    answer = json.loads(done.stdout)
    assert answer["idmapped_mount"] is not None
    assert set(answer) == set(namespace_probe.ATTEMPTS)


@pytest.mark.parametrize(
    ("switch", "value", "remedy"),
    [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces"),
        ("kernel/unprivileged_userns_clone", "0", "unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor profile"),
    ],
)
def test_the_switch_that_forbids_user_namespaces_is_named(tmp_path: Path, switch: str, value: str, remedy: str) -> None:
    (tmp_path / switch).parent.mkdir()
    (tmp_path / switch).write_text(value + "\n")
    assert remedy in capabilities.user_namespace_remedy(tmp_path)


def test_a_container_is_suspected_when_no_switch_forbids_user_namespaces(tmp_path: Path) -> None:
    assert "Docker" in capabilities.user_namespace_remedy(tmp_path)


def test_the_directory_that_other_users_cannot_pass_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "closed" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    assert capabilities.unreachable_part(inner) is not None
    assert capabilities.unreachable_part(Path("/usr/bin")) is None
    assert capabilities.unreachable_part(tmp_path / "absent") is not None


def test_an_unwritable_state_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = capabilities.state_dir_capability(tmp_path / "file" / "state")
    assert not found.ok
    assert "--state-dir" in found.remedy


def test_a_missing_toolchain_names_its_command(tmp_path: Path) -> None:
    found = capabilities.interpreter_capability(tmp_path)
    assert not found.ok
    assert "rollout image build python" in found.remedy


def test_an_attempt_reports_the_call_that_was_refused() -> None:
    def refused(uid: int | None) -> None:
        raise OSError(1, "mount (tmpfs): Operation not permitted")

    assert namespace_probe.attempt(refused, None) == "mount (tmpfs): Operation not permitted"
    assert namespace_probe.attempt(lambda uid: None, None) is None
