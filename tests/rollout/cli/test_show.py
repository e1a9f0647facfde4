"""`rollout show` lists what a run recorded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollout.cli.main import main
from rollout.journal.records import GroupRecord
from rollout.journal.writer import Journal
from tests.rollout.journal.test_journal import groups

pytestmark = pytest.mark.anyio


async def test_the_last_groups_are_those_that_began_last_in_their_order(tmp_path: Path, capsys: Any) -> None:
    first, second, third, fourth = await groups(4)
    async with Journal.open(tmp_path) as journal:
        for group in (fourth, first, third, second):  # as they happened to finish
            journal.append(GroupRecord(group=group))
    assert main(["show", str(tmp_path), "--limit", "3"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^ +(\d+)  ", shown, re.MULTILINE) == ["1", "2", "3"]
    assert "the last 3 groups:" in shown
