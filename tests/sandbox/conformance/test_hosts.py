"""Hosts that lack something, as plain containers do: a structured report and a typed error, never a weaker sandbox.

Each is made in a mount namespace of its own, so that nothing of it outlives the command that runs there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sandbox.types import JailName

REPOSITORY = Path(__file__).resolve().parents[3]
TIMEOUT_S = 100
NO_CGROUPS = "for t in cgroup cgroup2; do umount -a -l -t $t; done 2>/dev/null; mount -t tmpfs none /sys/fs/cgroup"
READ_ONLY = """
while read -r _ place kind _; do
  case $kind in cgroup*) mount -o remount,bind,ro $place || exit 77;; esac
done < /proc/self/mounts
"""
MASKED_PROC = "mount --bind /dev/null /proc/version"
FILTERED = """
import ctypes, os, sys
sys.path[:0] = [word for word in os.environ.get("PYTHONPATH", "").split(":") if word]
from sandbox.jails.seccomp import build_filter
program = build_filter()
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(len(program) // 8, program))) == 0
os.execv(sys.argv[1], sys.argv[1:])
"""
Words = Sequence[str]
Answer = tuple[int, dict[str, Any], str]


class Lacking:
    """A host to run commands on.

    Args:
        wrap: from a command to one that runs it there.
        python: the interpreter, and what becomes its user.
    """

    def __init__(self, wrap: Words, python: Words, env: Mapping[str, str], state_dir: Path, jail: str) -> None:
        self._wrap, self._python, self._env = wrap, python, env
        self._flags = ("--state-dir", str(state_dir), "--jail", jail)

    def rollout(self, name: str, *words: str) -> Answer:
        """Exit status, the JSON object that was printed ({} for none), and what was said on stderr."""
        command = [*self._wrap, *self._python, "-m", "rollout.cli.main", name, "--json", *self._flags, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=self._env, stdin=subprocess.DEVNULL
        )
        assert done.returncode != 77, "this host could not be made"
        return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def in_mount_namespace(prepare: str) -> list[str]:
    """Words before a command that runs it, as the same user and as powerless, where `prepare` has been done."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux) to make such a host")
    own, drop = [], ""
    if os.geteuid() != 0:
        own = ["--user", f"--map-user={os.geteuid()}", f"--map-group={os.getegid()}", "--keep-caps"]
        drop = "setpriv --ambient-caps=-all --inh-caps=-all"
    return ["unshare", *own, "--mount", "sh", "-c", f'{{ {prepare}\n}} || exit 77; exec {drop} "$@"', "sh"]


@pytest.fixture
def here(state_dir: Path, jail: JailName) -> tuple[Words, Mapping[str, str], Path, JailName]:
    """The interpreter, variables, state directory and jail of this very process."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])}
    return [sys.executable], env, state_dir, jail


def assert_structured(report: dict[str, Any]) -> None:
    """Each missing thing has a name and a remedy."""
    for entry in (*report["limits"], *report["checks"], *report["capabilities"]):
        assert entry["name"]
        assert entry.get("enforced", entry.get("ok")) or entry["remedy"], entry


def assert_refuses(host: Lacking, *remedies: str) -> None:
    """The doctor says why nothing can be isolated, and no command runs."""
    status, report, _ = host.rollout("doctor")
    assert status == 1
    assert not report["isolates"]
    assert report["failure"]
    assert_structured(report)
    status, result, said = host.rollout("exec", "--", "id")
    assert (status, result) == (2, {}), said
    assert any(remedy in said for remedy in remedies), said


def assert_reports_limits(host: Lacking) -> None:
    """Isolation holds; each limit that needs a cgroup is named with a remedy, and a spec that insists is refused."""
    status, report, said = host.rollout("doctor")
    assert status == 0, (report, said)
    assert report["isolates"]
    assert_structured(report)
    limits = {entry["name"]: entry for entry in report["limits"]}
    assert [limits[name]["enforced"] for name in ("memory", "cpus", "pids", "disk")] == [False, False, False, True]
    status, result, said = host.rollout("exec", "--", "sh", "-c", "exit 7")
    assert (status, result["reason"], result["exit_code"]) == (0, "exit", 7), said
    assert {"memory", "cpus", "pids"} <= set(result["unenforced"])
    status, result, said = host.rollout("exec", "--insist", "memory", "--", "true")
    assert (status, result) == (2, {})
    assert "memory" in said


def test_a_host_without_cgroups_isolates_and_names_what_it_cannot_limit(here: Any) -> None:
    assert_reports_limits(Lacking(in_mount_namespace(NO_CGROUPS), *here))


def test_a_host_with_read_only_cgroups_isolates_and_names_what_it_cannot_limit(here: Any) -> None:
    assert_reports_limits(Lacking(in_mount_namespace(READ_ONLY), *here))


def test_a_container_that_masks_proc_is_refused_with_the_switch_to_turn(here: Any) -> None:
    assert_refuses(Lacking(in_mount_namespace(MASKED_PROC), *here), "systempaths=unconfined")


def test_a_container_whose_filter_forbids_namespaces_is_refused_with_the_switch_to_turn(here: Any) -> None:
    python, env, state_dir, jail = here
    wrap = [*python, "-c", FILTERED]
    assert_refuses(Lacking(wrap, python, env, state_dir, jail), "seccomp=unconfined")


def test_a_host_without_user_namespaces_is_refused_with_the_switch_to_turn(
    unprivileged: tuple[list[str], dict[str, str], Path], jail: JailName
) -> None:
    python, env, own = unprivileged
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux) to make such a host")
    identity = ["--user", "--map-user=12345", "--map-group=12345", "--keep-caps"]
    close = "echo 0 > /proc/sys/user/max_user_namespaces || exit 77"
    drop = "setpriv --ambient-caps=-all --inh-caps=-all"
    wrap = [*python[:-1], "unshare", *identity, "sh", "-c", f'{close}; exec {drop} "$@"', "sh"]
    assert_refuses(Lacking(wrap, python[-1:], env, own, jail), "user.max_user_namespaces")
