"""What a sandbox starts with: a workspace copied from the host, and the user that its code is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.errors import ConfigError, TransferError
from sandbox.files import pipes
from sandbox.files import tree as files_tree
from sandbox.host import SandboxHost
from sandbox.types import KIB, MIB, Command, JailName, Limits, SandboxSpec, Skipped
from tests.sandbox.commands.test_exec_reasons import rollout

pytestmark = pytest.mark.anyio
SMALL = Limits(disk_bytes=1 * MIB, inodes=64, file_size_bytes=512 * KIB)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with a bit of everything."""
    root = tmp_path / "tree"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "src" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "src" / "run.sh").chmod(0o4755)
    (root / "src" / "deep" / "data").write_bytes(bytes(range(256)) * 400)
    (root / "src" / "closed").mkdir()
    (root / "src" / "closed" / "x").write_text("x")
    (root / "src" / "closed").chmod(0o555)
    (root / "inside").symlink_to("src/deep/data")
    (root / "src" / "up").symlink_to("../inside")
    (root / "outside").symlink_to("../elsewhere")
    (root / "absolute").symlink_to("/etc/passwd")
    os.mkfifo(root / "fifo")
    os.utime(root / "src" / "run.sh", (1_000_000_000, 1_000_000_000))
    return root


async def out(host: SandboxHost, spec: SandboxSpec, script: str) -> str:
    async with host.acquire(spec) as box:
        outcome = await box.run(Command(argv=("sh", "-c", script)))
    assert outcome.ok, outcome
    return outcome.stdout.decode()


async def test_a_workspace_starts_as_the_copy_of_a_directory(host: SandboxHost, jail: JailName, tree: Path) -> None:
    spec = SandboxSpec(jail=jail, workspace=str(tree))
    async with host.acquire(spec) as box:
        assert box.workspace_skipped == (
            Skipped(path="absolute", kind="symlink"),
            Skipped(path="fifo", kind="fifo"),
            Skipped(path="outside", kind="symlink"),
        )
        script = (
            "src/run.sh; stat -c '%a %u %Y' src/run.sh; stat -c %a src/closed; readlink inside; wc -c < src/up; ls -A"
        )
        outcome = await box.run(Command(argv=("sh", "-c", script)))
        assert outcome.stdout.split() == [
            *(b"ran", b"755", b"1000", b"1000000000", b"555", b"src/deep/data", b"102400", b"inside", b"src"),
        ]
        await box.run(Command(argv=("sh", "-c", "echo changed > src/run.sh")))
    assert (tree / "src" / "run.sh").read_text().endswith("ran\n")
    assert await out(host, spec, "src/run.sh") == "ran\n"


async def test_a_workspace_that_will_not_do_is_refused_before_anything_starts(
    host: SandboxHost, tmp_path: Path
) -> None:
    large, many, deep = tmp_path / "large", tmp_path / "many", tmp_path / "deep"
    large.mkdir()
    for name in ("a", "b", "c"):
        (large / name).write_bytes(bytes(400 * 1024))
    many.mkdir()
    for number in range(80):
        (many / str(number)).touch()
    deep.mkdir()
    (deep / "big").write_bytes(bytes(600 * 1024))
    for path, words in (
        ("/nonexistent", "No such file"),
        (str(large / "a"), "Not a directory"),
        (str(large), "limits.disk_bytes = 1 MiB"),
        (str(many), "limits.inodes = 64"),
        (str(deep), "limits.file_size_bytes"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            async with host.acquire(SandboxSpec(workspace=path, limits=SMALL)):
                pass
        assert caught.value.field == "spec.workspace"
    assert host.num_live == 0
    with pytest.raises(ConfigError, match="absolute"):
        SandboxSpec(workspace="relative")


async def test_a_workspace_file_that_cannot_be_read_is_refused_before_anything_starts(
    host: SandboxHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").write_text("x")
    (tmp_path / "closed").chmod(0)
    if os.geteuid() == 0:  # which reads everything
        monkeypatch.setattr(files_tree.os, "access", lambda *words, **more: False)
    with pytest.raises(ConfigError, match=r"closed.*cannot be read"):
        async with host.acquire(SandboxSpec(workspace=str(tmp_path))):
            pass


async def test_a_workspace_that_changes_while_its_sandbox_starts_is_a_failed_transfer(
    host: SandboxHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_text("x")

    def vanish(root: str) -> Iterator[bytes]:
        (tmp_path / "f").unlink(missing_ok=True)
        tmp_path.rmdir()
        return files_tree.tree_records(root)

    monkeypatch.setattr(pipes, "tree_records", vanish)
    with pytest.raises(TransferError, match="No such file"):
        async with host.acquire(SandboxSpec(workspace=str(tmp_path))):
            pass
    assert host.num_live == 0


@pytest.mark.parametrize("user", [0, 1000, 4321, 65_533])
async def test_code_sees_the_user_that_was_asked_for_and_has_no_capability(
    host: SandboxHost, jail: JailName, user: int
) -> None:
    name = {0: "root", 1000: "sandbox"}.get(user, f"user{user}")
    script = "id -u; id -g; id -un; touch f; stat -c %u f . /tmp; grep -c '^Cap.*:.0000000000000000$' /proc/self/status"
    seen = await out(host, SandboxSpec(jail=jail, user=user), script)
    assert seen.split() == [str(user), str(user), name, *[str(user)] * 3, "5"]
    async with host.acquire(SandboxSpec(jail=jail, user=user)) as box:
        for forbidden in (
            "mount -t tmpfs x /tmp",
            "mount -o remount,rw /",
            "unshare -m true",
            "touch /etc/x",
            "hostname x",
            "chown 5 /workspace",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
            "cat /proc/1/environ",
        ):
            assert not (await box.run(Command(argv=("sh", "-c", forbidden)))).ok, forbidden
        await box.write_file("g", b"x")
        assert (await box.run(Command(argv=("stat", "-c", "%u", "g")))).stdout == f"{user}\n".encode()


async def test_sandboxes_of_different_users_do_not_get_each_others_template(host: SandboxHost, jail: JailName) -> None:
    for user in (0, 1000, 0):
        assert await out(host, SandboxSpec(jail=jail, user=user), "id -u") == f"{user}\n"


def test_a_user_beyond_the_range_is_refused() -> None:
    for user in (-1, 65_534, 1 << 40):
        with pytest.raises(ConfigError, match="65533"):
            SandboxSpec(user=user)


def test_exec_takes_a_workspace_and_a_user(state_dir: Path, tree: Path) -> None:
    done = rollout(state_dir, "--workspace", str(tree), "--user", "0", "--", "sh", "-c", "src/run.sh; id -u")
    assert (done.returncode, done.stdout) == (0, b"ran\n0\n")
    assert b"left out of the workspace: fifo, symlink (3)" in done.stderr
    for words, said in (
        (("--workspace", "/nonexistent"), "--workspace = '/nonexistent'"),
        (("--workspace", str(tree), "--disk", "64K"), f"--workspace = '{tree}'"),
        (("--user", "65534"), "--user = '65534'"),
        (("--user", "root"), "--user = 'root'"),
    ):
        done = rollout(state_dir, *words, "--", "true")
        assert done.returncode == 2
        assert said in done.stderr.decode()
        assert len(done.stderr.splitlines()) == 1
