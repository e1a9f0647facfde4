"""Processes: what lives on, what must be dead, and what a command may not touch."""

from __future__ import annotations

import os
import time

import anyio
import pytest

from sandbox.errors import SandboxDiedError
from sandbox.sandbox import Sandbox
from sandbox.types import Command, Outcome, Reason
from tests.sandbox.conformance.arena import (
    PATIENCE_S,
    Arena,
    assert_names_become,
    below,
    names_inside,
    python,
    sh,
    shell,
    warden_of,
)

pytestmark = pytest.mark.anyio

ZOMBIES = """
import os
states = []
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{name}/stat") as file:
            states.append(file.read().rpartition(")")[2].split()[0])
    except OSError:
        continue
print(states.count("Z"))
"""


async def test_a_background_child_holds_nobody_up_and_lives_on(box: Sandbox) -> None:
    plain_s: list[float] = []
    held_s: list[float] = []
    for _ in range(5):
        for script, times_s in (("echo ok", plain_s), ("sleep 600 & echo ok", held_s)):
            started_s = time.monotonic()
            outcome = await sh(box, script)
            times_s.append(time.monotonic() - started_s)
            assert outcome.ok
            assert outcome.stdout == b"ok\n"
    assert min(held_s) < 1 + 2 * min(plain_s)
    await assert_names_become(box, *[b"sleep"] * 5)
    assert (await sh(box, "kill %1 2>/dev/null; true")).ok
    assert await names_inside(box) == [b"sleep"] * 5


async def test_a_timeout_kills_all_that_its_command_started_and_nothing_else(box: Sandbox) -> None:
    await sh(box, "sleep 600 &")
    outcome = await sh(box, "(setsid sleep 601 &) ; sleep 602 & setsid sh -c 'sleep 603' & sleep 604", timeout_s=0.5)
    assert outcome.reason is Reason.TIMEOUT
    assert await names_inside(box) == [b"sleep"]


async def test_orphans_are_reaped_by_the_thousand(box: Sandbox, full: bool) -> None:
    count = 10_000 if full else 1_000
    one = "os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', '/bin/true &'], {}), 0)"
    orphans = f"import os\nfor _ in range({count}):\n    {one}"
    outcome = await box.run(python(orphans, timeout_s=10 * PATIENCE_S))
    assert outcome.ok, outcome
    zombies = await box.run(python(ZOMBIES))
    assert zombies.stdout == b"0\n"
    assert await names_inside(box) == []


async def test_a_session_of_its_own_is_gone_when_the_sandbox_closes(arena: Arena) -> None:
    before = below(warden_of(arena.host))
    async with arena.hostile() as box:
        assert (await sh(box, "setsid sh -c 'sleep 600 & sleep 600 &' < /dev/null > /dev/null 2>&1")).ok
        await assert_names_become(box, b"sleep", b"sleep")
        assert len(below(warden_of(arena.host)) - before) >= 3
    # that nothing is left is what `hostile` checks when it is left


async def test_a_kill_of_everything_ends_at_most_the_session(arena: Arena) -> None:
    for script in ("kill -9 -1", "kill -9 1", "kill -STOP 1; kill -TERM 1; kill -SEGV 1", "kill -9 -1; kill -9 1"):
        async with arena.hostile() as box:
            try:
                outcome = await box.run(shell(f"sleep 600 & {script}; sleep 0.1; exit 4", timeout_s=PATIENCE_S))
                assert outcome.reason in (Reason.EXIT, Reason.SIGNAL), outcome
                assert (await sh(box, "echo alive")).stdout == b"alive\n"
            except SandboxDiedError:
                assert not box.alive  # a typed end; that siblings live is what `hostile` checks


async def test_only_the_standard_descriptors_are_open(box: Sandbox) -> None:
    for command in (shell("ls /proc/self/fd"), shell("exec ls /proc/self/fd", stdin=b"x")):
        outcome = await box.run(command)
        assert outcome.stdout.split() == [b"0", b"1", b"2", b"3"]  # 3 is the directory that is read


async def test_passed_descriptors_become_the_childs_own_and_no_other_is_open(box: Sandbox) -> None:
    pipes = [os.pipe() for _ in range(4)]  # for 0, 1, 2 and 3
    os.write(pipes[0][1], b"in")
    os.close(pipes[0][1])
    fds = [pipes[0][0], *(pipe[1] for pipe in pipes[1:])]
    async with box.start(Command(argv=("sh", "-c", "cat >&3; ls /proc/self/fd")), fds=fds) as process:
        for fd in fds:
            os.close(fd)
        outcome = await process.wait()
    assert outcome.ok
    assert outcome.stdout == outcome.stderr == b""
    assert os.read(pipes[3][0], 100) == b"in"
    assert os.read(pipes[1][0], 100).split() == [b"0", b"1", b"2", b"3", b"4"]  # 4 is the directory itself
    for read_end, _ in pipes[1:]:
        os.close(read_end)


async def test_the_agent_shows_nothing_and_cannot_be_traced(box: Sandbox) -> None:
    script = "cat /proc/1/environ /proc/1/maps /proc/1/mem; ls /proc/1/fd /proc/1/cwd; echo x > /proc/1/comm; true"
    outcome = await sh(box, script)
    assert outcome.stdout == b""
    traced = "import ctypes, os; print(ctypes.CDLL(None, use_errno=True).ptrace(16, 1, 0, 0))"
    assert (await box.run(python(traced))).stdout == b"-1\n"


async def test_commands_run_at_once_and_see_each_other(box: Sandbox) -> None:
    outcomes: list[Outcome] = []

    async def one(number: int) -> None:
        outcomes.append(await sh(box, f"echo {number} >> all; while [ $(wc -l < all) -lt 4 ]; do sleep 0.02; done"))

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(one, number)
    assert all(outcome.ok for outcome in outcomes)
