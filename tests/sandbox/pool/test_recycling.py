"""Recycled leases while agents, jails and wardens are killed, a few; in full by `scripts/soak recycling`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from sandbox.types import MIB
from tests.sandbox.pool.soak_recycling import Look, growth, soak


@pytest.mark.timeout(240)
def test_recycled_leases_with_random_kills_leave_nothing_and_grow_nothing(state_dir: Path) -> None:
    lines: list[str] = []
    tally = soak(state_dir, 240, 80, random.randrange(1 << 30), 0.05, lines.append)
    assert tally.wrong == [], lines
    assert [words for words in growth(tally.looks) if "cgroups" not in words] == [], lines
    assert tally.leases >= 240
    assert tally.recycled > 60, lines
    assert sum(tally.kills.values()) > 0


def test_growth_would_be_seen() -> None:
    calm = Look(rss_bytes=100 * MIB, fds=20, cgroups=100, mounts=9, processes=1)
    grown = Look(rss_bytes=200 * MIB, fds=21, cgroups=900, mounts=10, processes=2)
    assert growth([calm, calm, calm]) == []
    assert len(growth([calm, calm, grown])) == 5


def test_a_look_finds_this_process() -> None:
    look, end = Look.take(), os.pipe()
    try:
        assert Look.take().fds == look.fds + 2
        assert look.processes >= 1
        assert look.rss_bytes > MIB
    finally:
        for fd in end:
            os.close(fd)
