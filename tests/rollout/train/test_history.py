"""What a resumed run takes from its journal, and that it refuses a journal that has lost something."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fakes import collect, make_engine, make_task, scripted

from rollout.engine.evaluate import EvalTally
from rollout.errors import JournalFault, LearnerFault, SamplerFault
from rollout.journal.records import EvalRecord, GroupRecord
from rollout.journal.writer import Journal
from rollout.train.history import BEFORE, History, load_history
from rollout.train.workers import root_cause
from rollout.types import Group

pytestmark = pytest.mark.anyio


async def write_run(run_dir: Path, *, steps: tuple[int, ...], name: str = BEFORE) -> list[Group]:
    """A journal with one evaluation and one delivered group of two trajectories for each of `steps`."""
    groups = await collect(make_engine(scripted("wrong", "oracle")), [make_task(str(step)) for step in steps])
    report = EvalTally([make_task()], 1).report(name=name, temperature=1, weight_version=1, wall_s=1)
    async with Journal.open(run_dir) as journal:
        journal.append(EvalRecord(report=report))
        for group, step in zip(groups, steps, strict=True):
            journal.append(GroupRecord(group=group))
            journal.deliver(group, step)
    return groups


def load(run_dir: Path, steps_done: int, next_delivery_seq: int) -> History:
    return load_history(run_dir, steps_done=steps_done, next_delivery_seq=next_delivery_seq, groups_per_batch=1)


async def test_what_the_checkpoint_does_not_contain_is_delivered_again(tmp_path: Path) -> None:
    await write_run(tmp_path, steps=(0, 1, 2))
    history = load(tmp_path, 2, 4)
    assert [(one.step, one.seq_start) for one in history.deliveries] == [(2, 4)]
    assert len(history.rewards) == 3


async def test_each_process_that_worked_on_the_run_is_counted(tmp_path: Path) -> None:
    await write_run(tmp_path, steps=(0,))
    assert load(tmp_path, 1, 2).num_processes == 1
    async with Journal.open(tmp_path):
        assert load(tmp_path, 1, 2).num_processes == 2


async def test_a_journal_behind_the_checkpoint_is_refused_with_both_numbers_and_the_remedy(tmp_path: Path) -> None:
    await write_run(tmp_path, steps=(0, 1))
    with pytest.raises(JournalFault, match=r"2 whole RL steps and 4 deliveries, .* 3 steps and 6 deliveries") as caught:
        load(tmp_path, 3, 6)
    assert "Put the journal back" in str(caught.value)


async def test_an_empty_journal_is_the_start_of_a_run_and_of_no_other(tmp_path: Path) -> None:
    async with Journal.open(tmp_path):
        assert load(tmp_path, 0, 0).rewards == []
        with pytest.raises(JournalFault, match="0 whole RL steps and 0 deliveries"):
            load(tmp_path, 1, 2)


async def test_a_journal_without_its_beginning_is_refused(tmp_path: Path) -> None:
    await write_run(tmp_path, steps=(1, 2))
    with pytest.raises(JournalFault, match="RL step 0 is missing before step 2"):
        load(tmp_path, 2, 4)


async def test_a_trained_run_without_its_first_evaluation_is_refused(tmp_path: Path) -> None:
    await write_run(tmp_path, steps=(0,), name="other")
    with pytest.raises(JournalFault, match="the evaluation before them is missing"):
        load(tmp_path, 1, 2)


def test_what_the_learner_said_is_the_cause_and_not_that_it_ended() -> None:
    said = LearnerFault("the learner reports: ConfigError: learner.device = 'cuda': there is none")
    others = [SamplerFault("connection lost"), LearnerFault("the learner ended: exit status 1\n--- end of log")]
    assert root_cause(BaseExceptionGroup("", [*others, said])) is said
