"""Real task sets through real sandboxes: references pass, empty and known wrong programs do not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from rollout.tasks.load import load_tasks, load_with_report
from rollout.tasks.submission import extract_submission
from rollout.tasks.types import Task, TaskLimits
from rollout.types import Reward, Verdict

pytestmark = pytest.mark.anyio


async def verdicts_of(open_verifier: Any, pairs: list[tuple[Task, str | None]]) -> list[Verdict]:
    """One verdict for each pair, a few at once."""
    verdicts: list[Verdict | None] = [None] * len(pairs)
    async with open_verifier(retries=2) as verifier, anyio.create_task_group() as group:

        async def verify(i: int) -> None:
            verdicts[i] = await verifier.verify(*pairs[i])

        for i in range(len(pairs)):
            group.start_soon(verify, i)
    return [verdict for verdict in verdicts if verdict is not None]


async def test_every_humaneval_reference_passes_and_no_empty_program(open_verifier: Any, data_dir: Path) -> None:
    tasks = load_tasks(f"humaneval:{data_dir}/humaneval.jsonl.gz")
    for verdict in await verdicts_of(open_verifier, [(task, task.oracle) for task in tasks]):
        assert verdict.reward == Reward(1.0), verdict
    for verdict in await verdicts_of(open_verifier, [(task, "") for task in tasks[::4]]):
        assert verdict.reward == Reward(0.0), verdict


async def test_a_sample_of_mbpp_references_passes_and_no_empty_program(open_verifier: Any, data_dir: Path) -> None:
    tasks = load_tasks(f"mbppplus:{data_dir}/mbppplus-half.jsonl.gz")[1::16]
    for verdict in await verdicts_of(open_verifier, [(task, task.oracle) for task in tasks]):
        assert verdict.reward == Reward(1.0), verdict
    for verdict in await verdicts_of(open_verifier, [(task, "") for task in tasks]):
        assert verdict.reward == Reward(0.0), verdict


async def test_every_corrected_quixbugs_program_passes_and_every_buggy_one_fails(
    open_verifier: Any, data_dir: Path
) -> None:
    loaded = load_with_report(f"quixbugs:{data_dir}/quixbugs-half.jsonl.gz", skip_unsupported=True)
    for verdict in await verdicts_of(open_verifier, [(task, task.oracle) for task in loaded.tasks]):
        assert verdict.reward == Reward(1.0), verdict
    impatient = [msgspec.structs.replace(task, limits=TaskLimits(verify_timeout_s=1.0)) for task in loaded.tasks]
    evidence = {}
    for verdict in await verdicts_of(open_verifier, [(task, task.known_wrong[0]) for task in impatient]):
        assert verdict.reward == Reward(0.0), verdict
        evidence[verdict.task_id] = verdict.layers[-1].evidence
    assert evidence["quixbugs/bitcount"] == "timeout: not done within 1 s"
    assert "RecursionError" in evidence["quixbugs/gcd"]


async def test_recorded_programs_get_their_recorded_verdicts(open_verifier: Any, data_dir: Path) -> None:
    specs = (f"humaneval:{data_dir}/humaneval.jsonl.gz", f"mbppplus:{data_dir}/mbppplus-half.jsonl.gz")
    tasks = {task.id: task for spec in specs for task in load_tasks(spec)}
    with gzip.open(data_dir / "smollm2-rollouts.jsonl.gz", "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["task_id"] in tasks]
    chosen = [row for row in rows if row["visible_pass"]] + [row for row in rows if not row["visible_pass"]][::8]
    pairs = [(tasks[row["task_id"]], extract_submission(row["text"])) for row in chosen]
    for row, verdict in zip(chosen, await verdicts_of(open_verifier, pairs), strict=True):
        # HumanEval's own tests were recorded as the visible ones; MBPP+ has both kinds.
        recorded = verdict.layer("visible") or verdict.layer("hidden")
        assert recorded is not None
        assert recorded.passed == row["visible_pass"], (row, verdict)
        if verdict.layer("visible") is not None and row["hidden_pass"] is not None:
            assert verdict.reward == Reward(float(row["hidden_pass"])), (row, verdict)
