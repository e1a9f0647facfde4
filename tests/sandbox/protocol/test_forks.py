"""Forks of the engine without exec: they keep nothing alive, and disturb nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from sandbox.health.processes import inspect, snapshot
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, JailName, SandboxSpec
from tests.sandbox.death.mortals import variables
from tests.sandbox.waiting import until, wait_until

SCRIPT = Path(__file__).with_name("forking_engine.py")
DEADLINE_S = 2.0


@contextmanager
def forking_engine(state_dir: Path, jail: JailName, mark: str, how: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, str(SCRIPT), str(state_dir), jail, mark, how]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=variables()) as engine:
        try:
            yield engine
        finally:
            engine.kill()


def said(engine: subprocess.Popen[str]) -> dict[str, Any]:
    assert engine.stdout is not None
    result: dict[str, Any] = json.loads(engine.stdout.readline())
    return result


def sleeps(mark: str) -> list[int]:
    return [pid for pid, info in snapshot().items() if info.words == ("sleep", mark)]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["outlive", "outlive-raw"])
async def test_a_fork_that_outlives_a_killed_engine_keeps_nothing_of_it_alive(
    state_dir: Path, jail: JailName, how: str
) -> None:
    mark = f"4{os.getpid()}.1"
    with forking_engine(state_dir, jail, mark, how) as engine:
        facts = await anyio.to_thread.run_sync(said, engine)
        child = facts["child"]
        try:
            await until(lambda: len(sleeps(mark)) >= 2)  # the third may have been frozen before its exec
            engine.kill()
            await until(lambda: not sleeps(mark) and inspect(facts["warden"]) is None, DEADLINE_S)
            assert not any(map(os.path.exists, facts["roots"]))
            assert inspect(child) is not None
            if how == "outlive":  # its place, uids and all, is free for the next engine while the child lives on
                async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
                    assert host._slot.number == facts["slot"]
                    async with host.acquire(SandboxSpec(jail=jail)) as box:
                        assert (await box.run(Command(argv=("true",)))).ok
                assert inspect(child) is not None
        finally:
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: inspect(child) is None)


@pytest.mark.parametrize("how", ["collect", "worker"])
def test_a_fork_that_throws_away_what_it_inherited_disturbs_nothing(state_dir: Path, jail: JailName, how: str) -> None:
    with forking_engine(state_dir, jail, f"4{os.getpid()}.2", how) as engine:
        said(engine)
        assert said(engine) == {"undisturbed": True}
        assert engine.wait(timeout=30) == 0


@pytest.mark.anyio
async def test_a_fork_after_the_end_of_a_host_closes_nothing_of_others(state_dir: Path) -> None:
    """The host's numbers may be another's by then."""
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        pass
    assert host.disown() == []
