"""What one command used: its own CPU time, memory and killed processes, not what came before it."""

from __future__ import annotations

import anyio
import pytest

from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Limits, Outcome
from tests.sandbox.conformance.arena import PATIENCE_S, Arena, python, sh, shell

pytestmark = pytest.mark.anyio

HOG = "x = b'1' * 10**9"
SPIN = "import time\nwhile time.process_time() < 0.6: pass"
HOLD = "import sys, time; x = b'1' * (int(sys.argv[1]) << 20); time.sleep(float(sys.argv[2]))"


def peak_mib(outcome: Outcome) -> float:
    return outcome.usage.peak_memory_bytes / MIB


async def test_the_second_command_is_not_charged_with_the_firsts_oom_cpu_or_peak(box: Sandbox) -> None:
    hog = await box.run(python(f"{SPIN}\n{HOG}", timeout_s=PATIENCE_S))
    after = await sh(box, "true")
    assert hog.usage.cpu_s > 0.5
    assert after.ok
    assert after.usage.oom_kills == 0
    assert after.usage.cpu_s < hog.usage.cpu_s / 2
    assert peak_mib(after) < 40
    if "memory" not in box.unenforced:
        assert hog.usage.oom_kills == 1
        assert peak_mib(hog) > 80


async def test_a_peak_is_the_commands_own_and_says_what_it_covers(box: Sandbox) -> None:
    large = await box.run(python(HOLD, "60", "0"))
    small = await box.run(python(HOLD, "1", "0"))
    assert 60 <= peak_mib(large) < 96
    assert peak_mib(small) < 40
    assert {large.usage.peak_scope, small.usage.peak_scope} <= {"command", "process"}


async def test_processes_of_one_command_count_together_where_a_cgroup_counts(box: Sandbox) -> None:
    script = 'for i in 1 2; do python3 -I -S -c "$CODE" 30 1 & done; wait'
    both = await box.run(shell(script, env={"CODE": HOLD}, timeout_s=PATIENCE_S))
    assert both.ok
    assert peak_mib(both) >= (55 if both.usage.peak_scope == "command" else 30)


async def test_overlapping_commands_say_whose_peak_it_is(arena: Arena, box: Sandbox) -> None:
    outcomes: list[Outcome] = []

    async def one(command: str) -> None:
        outcomes.append(await sh(box, command))

    async with anyio.create_task_group() as group:
        for mine, other in (("a", "b"), ("b", "a")):
            group.start_soon(one, f": > {mine}; while ! [ -e {other} ]; do sleep 0.02; done")
    assert all(outcome.ok for outcome in outcomes)
    if arena.host.backend.name != "v2":  # there every command has a memory account of its own
        assert {outcome.usage.peak_scope for outcome in outcomes} <= {"sandbox", "process"}


async def test_cpu_time_of_children_counts_also_of_those_that_nobody_waited_for(box: Sandbox) -> None:
    waited = await box.run(shell('python3 -I -S -c "$CODE" & wait', env={"CODE": SPIN}, timeout_s=PATIENCE_S))
    assert waited.usage.cpu_s > 0.5
    orphan = '(python3 -I -S -c "$CODE" &); while ! [ -e spun ]; do sleep 0.05; done'
    left = await box.run(shell(orphan, env={"CODE": f"{SPIN}\nopen('spun', 'w')"}, timeout_s=PATIENCE_S))
    assert left.ok
    if "cpus" not in left.unenforced:
        assert left.usage.cpu_s > 0.5


async def test_wall_time_is_the_commands_and_sleeping_costs_no_cpu(box: Sandbox) -> None:
    outcome = await sh(box, "sleep 0.5")
    assert 0.5 <= outcome.usage.wall_s < PATIENCE_S / 2
    assert outcome.usage.cpu_s < 0.5


async def test_the_cpu_limit_holds_for_all_processes_together(arena: Arena) -> None:
    limits = Limits(cpus=0.25, memory_bytes=96 * MIB, pids=24)
    async with arena.hostile(limits) as box:
        outcome = await sh(box, "yes > /dev/null & yes > /dev/null & yes > /dev/null & wait", timeout_s=1.5)
        if "cpus" not in outcome.unenforced:
            assert outcome.usage.cpu_s <= 0.25 * (outcome.usage.wall_s + 0.5) + 0.1
