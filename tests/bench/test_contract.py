"""The benchmark contract: what a report says, how claims are judged, and the command's exit status."""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import anyio
import msgspec
import pytest
from rich.console import Console

from bench import runner
from bench.__main__ import main
from bench.machine import available_bytes, this_machine, versions
from bench.records import CannotMeasure, Measure, Report, Skipped, claim
from bench.rounds import Async, Batch, Series, interleave, percentile, ratio
from bench.runner import Findings
from bench.table import figure, print_report

ROOT = Path(__file__).resolve().parents[2]


class _Invented:
    """A benchmark that finds what it is told."""

    def __init__(self, findings: Findings | BaseException) -> None:
        self.findings = findings
        self.quick: bool | None = None

    async def run(self, quick: bool) -> Findings:
        self.quick = quick
        if isinstance(self.findings, BaseException):
            raise self.findings
        return self.findings


def _findings() -> Findings:
    measure = Measure(name="thing [a]", condition="concurrency 1", unit="ms", p50=1.5, p99=1234.5, per_second=2e3, n=9)
    return Findings(
        measures=[measure],
        skipped=[Skipped(name="other", reason="this host has none")],
        claims=[
            claim("fast enough", 1.1, "x", "<=", 1.2),
            claim("small enough", 5.01, "ms", "<=", 5.0),
            claim("unknown", None, "x", ">=", 2.0),
        ],
        notes=["as measured"],
    )


@pytest.fixture
def invented(monkeypatch: pytest.MonkeyPatch) -> _Invented:
    """`bench invented` is a benchmark with given findings."""
    benchmark = _Invented(_findings())
    monkeypatch.setitem(runner.BENCHMARKS, "invented", "made up")
    monkeypatch.setitem(sys.modules, "bench.invented.benchmark", benchmark)  # type: ignore[arg-type]
    return benchmark


def test_the_json_is_the_whole_report_and_names_the_machine(invented: _Invented, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    assert main(["invented", "--json", str(target), "--quick"]) == 0
    report = msgspec.json.decode(target.read_bytes(), type=Report, strict=True)
    assert invented.quick is True
    assert report.quick
    assert (report.benchmark, report.measures, report.claims) == ("invented", _findings().measures, _findings().claims)
    assert report.machine.num_cores >= 1
    assert report.machine.memory_bytes > 0
    assert report.machine.kernel
    assert report.versions["python"].startswith("3.")


def test_every_field_that_the_contract_names_is_in_the_json(invented: _Invented, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    assert main(["invented", "--json", str(target)]) == 0
    plain = msgspec.json.decode(target.read_bytes())
    assert {"machine", "versions", "measures", "claims"} <= plain.keys()
    assert {"name", "unit", "p50", "p99", "per_second", "n"} <= plain["measures"][0].keys()
    assert all(one.keys() == {"name", "value", "unit", "target", "holds"} for one in plain["claims"])


def test_the_table_shows_rows_claims_and_what_was_skipped(
    invented: _Invented, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["invented"]) == 0
    shown = capsys.readouterr().out
    for words in ("thing [a]", "1,234", "skipped other: this host has none", "does not hold", "not measured", "≤ 1.2"):
        assert words in shown


def test_claims_that_do_not_hold_leave_the_exit_status_at_zero(invented: _Invented) -> None:
    invented.findings = Findings(claims=[claim("too slow", 9.0, "x", "<=", 1.0)])
    assert main(["invented"]) == 0


def test_an_unknown_name_lists_the_names_and_ends_with_2() -> None:
    command = [sys.executable, "-m", "bench", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert all(name in done.stderr for name in ("'nothing'", "sandbox", "lane", "verify"))


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_cannot_be_measured_is_one_line_and_ends_with_2(
    invented: _Invented, wrapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = CannotMeasure("no user namespaces here")
    invented.findings = ExceptionGroup("workers", [error]) if wrapped else error
    assert main(["invented"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: no user namespaces here\n"
    assert captured.out == ""


def test_a_bug_is_not_hidden_as_something_that_cannot_be_measured(invented: _Invented) -> None:
    invented.findings = AssertionError("a bug")
    with pytest.raises(AssertionError, match="a bug"):
        main(["invented"])


def test_a_json_path_without_its_directory_is_refused_before_measuring(
    invented: _Invented, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["invented", "--json", "/nonexistent/report.json"]) == 2
    assert invented.quick is None
    assert "/nonexistent is not a directory" in capsys.readouterr().err


def test_a_json_path_that_cannot_be_written_ends_with_2(invented: _Invented, tmp_path: Path) -> None:
    assert main(["invented", "--json", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("value", "relation", "holds"),
    [
        (1.2, "<=", True),
        (1.2001, "<=", False),
        (1.2, "<", False),
        (1.19, "<", True),
        (1.2, ">=", True),
        (1.1, ">=", False),
    ],
)
def test_a_claim_compares_the_exact_value_with_its_target(value: float, relation: str, holds: bool) -> None:
    judged = claim("c", value, "x", relation, 1.2)  # type: ignore[arg-type]
    assert (judged.holds, judged.target) == (holds, f"{relation} 1.2")


def test_a_claim_without_a_value_neither_holds_nor_fails() -> None:
    judged = claim("c", None, "x", "<=", 1.0)
    assert judged.holds is None
    assert judged.value is None


def _series(*rounds: list[float]) -> Series:
    series = Series("s")
    series.batches = [Batch(samples_s=samples_s, wall_s=sum(samples_s)) for samples_s in rounds]
    return series


def test_the_median_is_taken_over_rounds_and_the_tail_over_all_samples() -> None:
    measure = _series([0.001] * 98, [0.002], [0.009]).measure()
    assert (measure.p50, measure.p99, measure.n) == (2.0, 2.0, 100)
    assert measure.per_second == pytest.approx(500)


def test_a_ratio_compares_within_each_round_so_that_drift_cancels() -> None:
    slow_machine = 10.0
    ours = _series([1.1], [1.1 * slow_machine], [1.1 * slow_machine])
    theirs = _series([1.0], [1.0 * slow_machine], [1.0 * slow_machine])
    assert ratio(ours, theirs) == pytest.approx(1.1)


def test_a_percentile_is_the_smallest_sample_that_covers_its_share() -> None:
    hundred = [float(i) for i in range(1, 101)]
    assert percentile(hundred, 0.99) == 99.0
    assert percentile(hundred, 0.5) == 50.0
    assert percentile([7.0], 0.99) == 7.0


@pytest.mark.anyio
async def test_every_peer_has_its_turn_in_every_round_and_the_order_changes() -> None:
    calls: list[str] = []

    def noting(name: str) -> Async:
        async def operate(worker: int) -> float:
            calls.append(name)
            return 0.5

        return Async(name, operate)

    series = await interleave([noting("a"), noting("b")], concurrency=1, rounds=3, slice_s=0.0)
    assert "".join(calls) == "ab" + "ab" + "ba" + "ab"
    assert len(series["a"].batches) == len(series["b"].batches) == 3
    assert statistics.median(series["a"].inner("inner").medians_s) == 0.5


@pytest.mark.anyio
async def test_a_spent_budget_ends_the_rounds_but_never_before_two() -> None:
    async def operate(worker: int) -> None:
        return None

    series = await interleave([Async("a", operate)], concurrency=1, rounds=9, slice_s=0.0, budget_s=0.0)
    assert len(series["a"].batches) == 2


@pytest.mark.anyio
async def test_workers_of_a_batch_run_at_the_same_time_and_each_at_least_once() -> None:
    arrived: set[int] = set()
    all_there = anyio.Event()

    async def operate(worker: int) -> None:
        arrived.add(worker)
        if len(arrived) == 5:
            all_there.set()
        with anyio.fail_after(5):
            await all_there.wait()

    batch = await Async("together", operate).batch(5, 0.0)
    assert arrived == set(range(5))
    assert len(batch.samples_s) == 5


def test_facts_about_this_machine_are_read() -> None:
    machine = this_machine()
    assert machine.cpu_model
    assert machine.load_1m >= 0
    assert 0 < available_bytes() <= machine.memory_bytes
    assert {"python", "msgspec", "uvloop"} <= versions().keys()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.6012, "0.601"), (1.2, "1.2"), (12.34, "12.3"), (1234.5, "1,234"), (99.96, "100.0")],
)
def test_figures_keep_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


def test_printing_needs_no_terminal_and_no_measures(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(
        benchmark="empty", quick=False, started_at="now", wall_s=0.0, machine=this_machine(), versions={}, measures=[],
        skipped=[], claims=[], notes=[],
    )  # fmt: skip
    print_report(report, Console(width=60))
    assert "bench empty" in capsys.readouterr().out
