"""A real multi-turn run: wrong programs fail in sandboxes, their error text comes back, corrections pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollout.cli.main import main
from rollout.journal.reader import read_records
from rollout.journal.records import GroupRecord
from rollout.rendering.bytes import BytesRenderer
from rollout.tasks.load import load_tasks
from rollout.types import Reward, StopReason

PROGRAMS = (
    "bucketsort",
    "find_in_sorted",
    "gcd",
    "hanoi",
    "kheapsort",
    "kth",
    "mergesort",
    "pascal",
    "powerset",
    "sieve",
)
"""Ten programs whose bug the visible tests show."""


def test_ten_buggy_programs_are_corrected_in_the_second_turn(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task_ids = ",".join(f"quixbugs/{name}" for name in PROGRAMS)
    tasks = f"quixbugs:{data_dir}/quixbugs-half.jsonl.gz"
    command = ["run", tasks, "--skip-unsupported", "--task-ids", task_ids, "--sampler", "scripted:wrong,oracle"]
    status = main([*command, "--group-size", "1", "--run-dir", str(tmp_path), "--json"])
    summary = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (summary["groups"], summary["mean_reward"], summary["turns"]) == (10, 1.0, 20)
    records = [record for record in read_records(tmp_path) if isinstance(record, GroupRecord)]
    assert sorted(record.group.task_id for record in records) == sorted(f"quixbugs/{name}" for name in PROGRAMS)
    for record in records:
        (trajectory,) = record.group.trajectories
        first, second = trajectory.turns
        assert trajectory.turn_rewards == (0.0, 1.0)
        assert (trajectory.reward, trajectory.stop_reason) == (Reward(1.0), StopReason.SUBMITTED)
        assert first.visible is not None
        failure = next(test for test in first.visible.tests if not test.passed)
        assert failure.detail
        assert failure.detail in first.observation
        assert first.submission != second.submission
        observed = BytesRenderer().observation(first.observation, closed=True)
        start = len(trajectory.token_ids) - second.num_action_tokens - len(observed)
        assert trajectory.token_ids[start : start + len(observed)] == observed
        assert not any(trajectory.loss_mask[start : start + len(observed)])
        hidden = trajectory.verdict.layer("hidden")
        assert hidden is not None
        assert hidden.num_passed == hidden.num_tests > 0


def test_the_run_can_be_listed_and_one_group_shown_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "demo:heldout:3", "--sampler", "wrong", "--group-size", "2", "--run-dir", str(tmp_path)])
    capsys.readouterr()
    assert main(["show", str(tmp_path)]) == 0
    listing = capsys.readouterr().out
    assert listing.count("demo/") == 3
    assert "0 0  2 submitted" in listing
    assert main(["show", str(tmp_path), "--group", "1"]) == 0
    assert "hidden: failed" in capsys.readouterr().out
    assert main(["show", str(tmp_path), "--json", "--group", "1"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["groups"]
    assert [t["verdict"]["reward"]["value"] for t in record["group"]["trajectories"]] == [0.0, 0.0]


@pytest.mark.parametrize(("policy", "expected"), [("oracle", 1.0), ("noop", 0.0), ("wrong", 0.0)])
def test_scripted_policies_get_exactly_the_rates_they_must(
    policy: str, expected: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "demo:heldout:8", "--sampler", policy, "--samples", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hidden"]["rate"] == expected
    assert report["pass_at"] == {"1": expected, "2": expected}
    assert (report["num_samples"], report["num_invalid"]) == (16, 0)


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")
def test_recorded_answers_get_their_recorded_verdicts(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = data_dir / "smollm2-rollouts.jsonl.gz"
    tasks = f"mbppplus:{data_dir}/mbppplus-half.jsonl.gz"
    rows = _recorded(recording)
    known = {task.id for task in load_tasks(tasks)}
    passing = [task_id for task_id, (visible, _) in rows.items() if visible and task_id in known]
    failing = [task_id for task_id in rows if task_id in known and task_id not in passing]
    chosen = ",".join([*passing[:4], *failing[:2]])
    command = ["eval", tasks, "--task-ids", chosen, "--sampler", f"recorded:{recording}", "--samples", "4", "--json"]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    for row in report["tasks"]:
        expected = rows[row["task_id"]]
        assert (row["num_visible"], row["num_hidden"]) == expected, row["task_id"]
    assert (len(report["tasks"]), report["hidden"]["passed"] > 0) == (6, True)


def test_mistakes_are_one_line_and_leave_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "demo:heldout:2", "--run-dir", str(tmp_path / "run")]
    for flags, message in (
        (["--sampler", "perfect"], "oracle, noop, wrong"),
        (["--sampler", "oracle", "--task-ids", "demo/none"], "no such task"),
        (["--sampler", "oracle", "--limit", "0"], "at least 1"),
        (["--sampler", "recorded:/nowhere.jsonl"], "nowhere"),
        (["--server", "localhost:1"], "unix:PATH"),
        (["--server", "unix:/nowhere", "--model-dir", str(tmp_path)], "tokenizer.json"),
    ):
        assert main([*run, *flags]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
    assert main(["show", str(tmp_path)]) == 2


def _recorded(path: Path) -> dict[str, tuple[int, int]]:
    """Visible and hidden passes by task."""
    import gzip

    counts: dict[str, tuple[int, int]] = {}
    for line in gzip.decompress(path.read_bytes()).splitlines():
        row = json.loads(line)
        visible, hidden = counts.get(row["task_id"], (0, 0))
        counts[row["task_id"]] = (visible + bool(row["visible_pass"]), hidden + bool(row["hidden_pass"]))
    return counts
