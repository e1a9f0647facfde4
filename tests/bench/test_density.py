"""The density benchmark: a small fleet really run, and how it stops where there is no room."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.density import benchmark, course, room
from bench.density.fleet import Fleet
from bench.records import CannotMeasure, Claim
from bench.runner import Findings
from sandbox.config import SandboxConfig
from sandbox.health.census import take_census
from sandbox.types import SandboxSpec

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the memory of five sandboxes."""
    monkeypatch.setattr(room, "_READINGS", 1)


def _plan(state_dir: Path, tmp_path: Path) -> benchmark.Plan:
    return benchmark.Plan(sandboxes=5, leased=2, report=str(tmp_path / "report"), state_dir=str(state_dir))


def _claim(findings: Findings, words: str) -> Claim:
    (found,) = [claim for claim in findings.claims if words in claim.name]
    return found


async def test_a_small_fleet_is_measured_as_a_large_one_would_be(state_dir: Path, tmp_path: Path) -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = await benchmark.measure(_plan(state_dir, tmp_path))
    rows = {(measure.name, measure.condition): measure for measure in findings.measures}
    for condition, count in (("5 idle", 5), ("2 leased, with limits", 2)):
        command = rows["command, one at a time", condition]
        assert (command.n, rows["host memory each", condition].n) == (count, count)
        assert 0 < command.p50 <= command.p99
        assert rows["create, several at a time", condition].per_second
        assert _claim(findings, f"{condition}: left behind").value == 0
        assert _claim(findings, f"{condition}: all closed").holds
        assert _claim(findings, f"{condition}: all created").holds
    assert _claim(findings, "5 idle: host memory each").target == "<= 600"
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == soft
    assert os.listdir(tmp_path / "report") in (["density.png"], [])
    assert take_census(state_dir).total == 0


async def test_a_limit_that_the_host_does_not_enforce_is_not_claimed(state_dir: Path) -> None:
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend="none")
    done = await course.run_course("leased", 1, SandboxSpec(), config, leased=True)
    assert {"memory", "pids", "cpus"} <= set(done.unenforced)
    assert benchmark._limits_claim(done).value == 3


async def test_without_matplotlib_the_picture_is_a_skipped_row(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    findings = await benchmark.measure(benchmark.Plan(
        sandboxes=1, leased=0, report=str(tmp_path), state_dir=str(state_dir)
    ))  # fmt: skip
    assert [one.name for one in findings.skipped] == ["picture"]
    assert {measure.condition for measure in findings.measures} == {"1 idle"}


async def test_growth_that_runs_short_ends_with_the_number_and_leaves_nothing(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "FLOOR_BYTES", 1 << 60)
    config = SandboxConfig(state_dir=str(state_dir))
    with pytest.raises(ExceptionGroup) as caught:
        await course.run_course("idle", 3, SandboxSpec(), config, leased=False)
    assert "memory is short after 3 sandboxes" in str(caught.value.exceptions)
    assert take_census(state_dir).total == 0


async def test_a_fleet_that_is_not_there_in_time_ends_with_the_number(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "GROW_S", 0.0)
    with pytest.raises(CannotMeasure, match="0 of 3 sandboxes were there after 0 s"):
        await course.run_course("idle", 3, SandboxSpec(), SandboxConfig(state_dir=str(state_dir)), leased=False)
    assert take_census(state_dir).total == 0


async def test_a_sandbox_that_does_not_answer_well_ends_the_measurement(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Fleet, index: int) -> float:
        raise CannotMeasure(f"sandbox {index} is mute")

    monkeypatch.setattr(Fleet, "command", fail)
    with pytest.raises(CannotMeasure, match="is mute"):
        await course.run_course("idle", 2, SandboxSpec(), SandboxConfig(state_dir=str(state_dir)), leased=False)
    assert take_census(state_dir).total == 0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("available_bytes", 2 << 30, r"10,000 sandboxes need 10\.8 GiB available, here are 2\.0 GiB"),
        ("free_descriptors", 500, "10,000 sandboxes need a descriptor each, 500 are free"),
        ("free_processes", 500, "10,000 sandboxes need a process each, 500 are free"),
    ],
)
def test_a_number_that_cannot_fit_is_refused_before_anything_starts(
    name: str, value: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"available_bytes": 1 << 40, "free_descriptors": 1 << 20, "free_processes": 1 << 20, name: value}
    for one, amount in there.items():
        monkeypatch.setattr(room, one, lambda amount=amount: amount)
    with pytest.raises(CannotMeasure, match=words):
        room.require_room(10_000)


def test_what_is_free_is_read_from_this_process_and_machine() -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert room.free_descriptors() < soft - len(os.listdir("/proc/self/fd"))
    assert room.free_processes() < int(Path("/proc/sys/kernel/pid_max").read_text())
    with room.all_descriptors():
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_an_option_of_another_benchmark_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lane", "--sandboxes", "5"]) == 2
    assert "--sandboxes is not an option of bench lane" in capsys.readouterr().err


def test_no_sandboxes_are_refused_and_so_is_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["density", "--sandboxes", "0"]) == 2
    assert "--sandboxes must be at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["density", "--leased", "-1"])
    assert "must be a whole number" in capsys.readouterr().err


def test_a_report_folder_that_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["density", "--sandboxes", "1", "--report", str(tmp_path / "file")]) == 2
    assert "--report" in capsys.readouterr().err
