"""The nsjail jail: a pure argument list that gives nothing of the host for writing, and what the warden adds to it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox.build import ensure_native
from sandbox.errors import ConfigError
from sandbox.images.types import Image, Mount
from sandbox.jails.nsjail import START_ITEMS, argv, explain
from sandbox.jails.plan import DEVICES, WRITABLE, JailPlan
from sandbox.protocol.wire import Tag, text
from sandbox.types import JailName
from tests.sandbox.tools import installed

PLAN = JailPlan(tool="/state/bin/nsjail", agent="/state/bin/agent", masked=("kallsyms",), nice=7)
IMAGE = Image("test", (Mount("/usr", "/usr"), Mount("usr/bin", "/bin", "symlink")), "/usr/bin")


def after(words: tuple[str, ...], flag: str) -> list[str]:
    """Every value of that flag."""
    return [words[i + 1] for i, word in enumerate(words) if word == flag]


def test_equal_arguments_give_equal_lists_and_change_nothing() -> None:
    before = (repr(PLAN), repr(IMAGE))
    assert argv(PLAN, IMAGE) == argv(PLAN, IMAGE)
    assert (repr(PLAN), repr(IMAGE)) == before


def test_no_namespace_is_shared_and_nothing_is_kept() -> None:
    words = argv(PLAN, IMAGE)
    assert words[1] == "-Mo"
    for word in words:
        assert not word.startswith(("--disable_clone", "--disable_no_new_privs", "--keep", "--cap", "--iface", "--rw"))
    assert after(words, "--pass_fd") == ["3", "4"]
    assert after(words, "--user") == after(words, "--group") == ["1000"]


def test_nsjails_own_limits_are_off_for_the_warden_sets_them() -> None:
    words = argv(PLAN, IMAGE)
    assert after(words, "--time_limit") == ["0"]
    assert after(words, "--nice_level") == ["7"]
    assert "--disable_rlimits" in words
    assert "--skip_setsid" in words  # supervisor and agent are killed as one process group


def test_nothing_of_the_host_is_bound_for_writing() -> None:
    words = argv(PLAN, IMAGE)
    assert not {"--bindmount", "-B", "--tmpfsmount", "-T"} & set(words)
    assert after(words, "--mount") == ["none:/proc:proc"]
    assert START_ITEMS[1] == text(Tag.SEAL, "/")
    assert [item for item in START_ITEMS if item[0] == Tag.DEVICE] == [text(Tag.DEVICE, path) for path in DEVICES]


def test_the_image_is_mounted_as_it_says() -> None:
    words = argv(PLAN, IMAGE)
    joined = " ".join(words)
    assert "/usr:/usr" in after(words, "--bindmount_ro")
    assert "usr/bin:/bin" in after(words, "--symlink")
    assert {f".:{path}/.hidden" for path in WRITABLE} <= set(after(words, "--symlink"))
    assert "--disable_proc" in words
    assert joined.endswith("-- /.rollout/agent agent 3 4")


@pytest.mark.parametrize("path", ["/images/a:b/usr", "/run/user/1000/usr"])
def test_a_path_that_nsjail_would_split_or_not_find_is_refused_with_a_remedy(path: str) -> None:
    for plan, image in (
        (PLAN, Image("odd", (Mount(path, "/usr"),), "/usr/bin")),
        (JailPlan(tool="/x/nsjail", agent=path), IMAGE),
    ):
        with pytest.raises(ConfigError, match=rf"{path}.*use bubblewrap"):
            argv(plan, image)
    assert "/runner/usr:/usr" in argv(PLAN, Image("fine", (Mount("/runner/usr", "/usr"),), "/usr/bin"))


def test_what_nsjail_says_about_a_failure_becomes_one_line() -> None:
    words = (
        "[W][2026-01-02T03:04:05+0000][1] mountSinglePoint():229 mount('/a' -> '/b'): No such file or directory\n"
        "[E][2026-01-02T03:04:05+0000][1] initCloneNs():270 Failed to build mount tree\n"
    )
    assert explain(words) == "mount('/a' -> '/b'): No such file or directory; Failed to build mount tree"
    assert explain("executing /x: Permission denied") == "executing /x: Permission denied"


@pytest.mark.parametrize("words", [("agent", "0"), ("agent", "0", "9")])
def test_an_agent_that_nothing_confines_does_not_serve(words: tuple[str, ...]) -> None:
    done = subprocess.run([ensure_native(), *words], stdin=subprocess.DEVNULL, capture_output=True, timeout=10)
    assert done.returncode == 1
    assert b"left something open" in done.stderr or b"system-call filter" in done.stderr


def shell_in(state_dir: Path, jail: str, script: str) -> list[str]:
    """Words that run a script in a sandbox of that jail."""
    python = [sys.executable, "-m", "rollout.cli.main"]
    return [*python, "exec", "--state-dir", str(state_dir), "--jail", jail, "--", "sh", "-c", script]


def test_a_start_leaves_no_directory_of_nsjails_behind(state_dir: Path, list_work_dirs: Callable[[], set[str]]) -> None:
    installed("nsjail")
    before = list_work_dirs()
    done = subprocess.run(shell_in(state_dir, "nsjail", "echo ok"), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"ok\n"), done.stderr
    assert list_work_dirs() <= before


@pytest.fixture
def list_work_dirs() -> Callable[[], set[str]]:
    places = [Path(place) for place in ("/run", "/run/user", "/tmp", "/dev/shm")]
    uid = "70" if os.geteuid() == 0 else str(os.getuid())  # 700,000 and on

    def look() -> set[str]:
        return {str(path) for place in places for path in place.glob(f"nsjail.{uid}*")}

    return look


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount below /usr to try it")
def test_what_is_mounted_below_the_image_is_read_only_too_and_gives_no_device(state_dir: Path, jail: JailName) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare for a mount that the host does not see")
    look = (
        "cat /usr/share/f; touch /usr/share/x; head -c 1 /usr/share/zero; head -c 1 /dev/zero | wc -c; echo > /dev/null"
    )
    make = (
        "mount -t tmpfs -o mode=1777 none /usr/share && echo there > /usr/share/f && chmod 777 /usr/share/f && "
        f"mknod -m 666 /usr/share/zero c 1 5 && exec {shlex.join(shell_in(state_dir, jail, look))}"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", make], capture_output=True, timeout=60)
    assert done.stdout.split() == [b"there", b"1"], done.stderr
    assert b"/usr/share/x': Read-only file system" in done.stderr
    assert b"/usr/share/zero' for reading: Permission denied" in done.stderr
    assert done.returncode == 0
