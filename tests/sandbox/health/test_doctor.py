"""The doctor says what holds on this host, as root and as an unprivileged user, and never guesses."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rollout.cli.doctor import render
from sandbox.health.doctor import LimitReport, Report, limit_reports, look_inside
from sandbox.types import JailName

GOOD = """uid=1000
CapEff:\t0000000000000000
CapBnd:\t0000000000000000
NoNewPrivs:\t1
Seccomp:\t2
interfaces=lo
processes=4
"""


def test_a_sound_sandbox_passes_every_check() -> None:
    assert all(check.ok for check in look_inside(GOOD))


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("uid=1000", "uid=0", "unprivileged"),
        ("CapEff:\t0000000000000000", "CapEff:\t00000000a80425fb", "no capabilities"),
        ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "no new privileges"),
        ("Seccomp:\t2", "Seccomp:\t0", "system call filter"),
        ("interfaces=lo", "interfaces=lo\ninterfaces=eth0", ""),
        ("interfaces=lo", "interfaces=lo eth0", "no network"),
        ("processes=4", "processes=412", "own processes"),
        ("processes=4", "processes=4\nwritable=/usr", "read-only image"),
        ("processes=4", "processes=4\nseen=/etc/shadow", "host hidden"),
    ],
)
def test_a_hole_in_the_sandbox_fails_its_check(before: str, after: str, name: str) -> None:
    failed = {check.name for check in look_inside(GOOD.replace(before, after)) if not check.ok}
    assert failed == ({name} if name else set())


def test_silence_passes_no_check() -> None:
    assert not any(check.ok for check in look_inside(""))


def test_an_unenforced_limit_carries_the_remedy_of_its_host() -> None:
    rows = {row.name: row for row in limit_reports(("memory",), {"v2": "Permission denied"}, "none")}
    assert not rows["memory"].enforced
    assert "Permission denied" in rows["memory"].how
    assert rows["memory"].remedy
    assert rows["disk"].enforced
    assert rows["wall_time"].enforced


def test_a_limit_whose_controller_is_not_delegated_says_that_alone() -> None:
    reasons = {"hybrid": "no cgroup v1 hierarchy", "v2": "/own has no controller cpu"}
    rows = {row.name: row for row in limit_reports(("cpus",), reasons, "v2")}
    assert (rows["cpus"].enforced, rows["memory"].enforced) == (False, True)
    assert rows["cpus"].how == "v2: /own has no controller cpu"
    assert "cpu" in rows["cpus"].remedy


def test_the_page_names_what_is_missing_and_its_remedy() -> None:
    report = Report(
        isolates=True,
        backend="none",
        state_dir="/somewhere",
        limits=(LimitReport(name="memory", enforced=False, how="not enforced", remedy="run [it] as root"),),
        checks=look_inside(GOOD),
    )
    console = Console(file=io.StringIO(), width=100)
    render(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "isolates" in text
    assert "run [it] as root" in text


def doctor(python: list[str], env: dict[str, str], state_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*python, "-m", "rollout.cli.main", "doctor", "--state-dir", str(state_dir), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, stdin=subprocess.DEVNULL)


def test_the_doctor_runs_a_sandbox_and_names_each_limit(state_dir: Path, jail: JailName) -> None:
    done = doctor([sys.executable], dict(os.environ), state_dir, "--json", "--jail", jail)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["isolates"]
    assert report["jail"] == jail
    assert {"bubblewrap", "nsjail"} <= {entry["name"] for entry in report["capabilities"]}
    nodes = next(entry for entry in report["capabilities"] if entry["name"] == "own device nodes")
    assert nodes["ok"] or os.geteuid() != 0
    assert {"memory", "cpus", "pids", "disk"} <= {limit["name"] for limit in report["limits"]}
    for entry in report["limits"]:
        assert entry["enforced"] or entry["remedy"], entry
    for entry in (*report["checks"], *report["capabilities"]):
        assert entry["ok"] or entry["remedy"], entry


def test_the_doctor_prints_a_page(state_dir: Path) -> None:
    done = doctor([sys.executable], dict(os.environ), state_dir)
    assert done.returncode == 0
    assert "isolates" in done.stdout
    assert "memory" in done.stdout


def test_an_unprivileged_user_is_isolated_and_told_what_does_not_hold(
    unprivileged: tuple[list[str], dict[str, str], Path], jail: JailName
) -> None:
    python, env, own = unprivileged
    done = doctor(python, env, own, "--json", "--jail", jail)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["isolates"]
    limits = {limit["name"]: limit for limit in report["limits"]}
    assert limits["disk"]["enforced"]
    for limit in limits.values():
        assert limit["enforced"] or limit["remedy"]
    shared = next(entry for entry in report["capabilities"] if entry["name"] == "separate uids")
    assert not shared["ok"]
    nodes = next(entry for entry in report["capabilities"] if entry["name"] == "own device nodes")
    assert not nodes["ok"]
    assert nodes["remedy"]


def test_a_host_that_cannot_isolate_is_told_why_and_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = doctor([sys.executable], dict(os.environ), tmp_path / "file", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert not report["isolates"]
    assert report["failure"]
