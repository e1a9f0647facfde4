"""Why a command ended: eight reasons, each given for what was observed, never one for another."""

from __future__ import annotations

import signal

import anyio
import pytest

from sandbox.errors import TransferError
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, Outcome, Reason
from tests.sandbox.conformance.arena import (
    PATIENCE_S,
    Arena,
    assert_limit_reason,
    names_inside,
    python,
    sh,
    shell,
)

pytestmark = pytest.mark.anyio

HOG = "x = b'1' * 10**9"
FORKS = """
import os, sys, time
try:
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
except BlockingIOError as error:
    sys.exit(f"refused: {error}")
"""


def seen(outcome: Outcome) -> tuple[Reason, int | None, int | None]:
    return outcome.reason, outcome.exit_code, outcome.signal


async def test_a_self_kill_an_oom_and_a_timeout_are_three_reasons(box: Sandbox) -> None:
    killed = await sh(box, "kill -KILL $$")
    late = await sh(box, "sleep 600", timeout_s=0.2)
    hog = await box.run(python(HOG))
    assert seen(killed) == (Reason.SIGNAL, None, 9)
    assert seen(late) == (Reason.TIMEOUT, None, 9)
    assert_limit_reason(hog, "memory", Reason.OOM, [Reason.EXIT])
    if "memory" in hog.unenforced:  # each process is held alone, and Python is told so
        assert hog.exit_code == 1
        assert b"MemoryError" in hog.stderr
    else:
        assert (hog.signal, hog.usage.oom_kills) == (9, 1)
    assert killed.usage.oom_kills == late.usage.oom_kills == 0


async def test_an_exit_code_is_an_exit_whatever_it_resembles(box: Sandbox) -> None:
    for code in (0, 1, 7, 124, 126, 127, 137, 139, 143, 255):
        outcome = await sh(box, f"exit {code}")
        assert seen(outcome) == (Reason.EXIT, code, None)
        assert outcome.ok is (code == 0)


async def test_a_signal_that_it_sends_itself_is_a_signal(box: Sandbox) -> None:
    for number in (1, 2, 6, 9, 11, 14, 15, 24, 25):
        assert seen(await sh(box, f"kill -{number} $$")) == (Reason.SIGNAL, None, number)


async def test_a_crash_is_a_signal_and_leaves_no_core(box: Sandbox) -> None:
    outcome = await box.run(python("import ctypes; ctypes.string_at(0)"))
    assert seen(outcome) == (Reason.SIGNAL, None, 11)
    assert (await sh(box, "ls -A")).stdout == b""


async def test_a_signal_under_a_command_of_the_shell_is_the_shells_exit(box: Sandbox) -> None:
    assert seen(await sh(box, "sh -c 'kill -9 $$' || exit $?")) == (Reason.EXIT, 137, None)


async def test_a_timeout_ends_a_command_that_ignores_every_signal(box: Sandbox) -> None:
    stubborn = "trap '' HUP INT QUIT TERM PIPE ALRM; echo ready; while :; do sleep 600 & wait; done"
    outcome = await sh(box, stubborn, timeout_s=1)
    assert seen(outcome) == (Reason.TIMEOUT, None, 9)
    assert outcome.stdout == b"ready\n"
    assert await names_inside(box) == []


async def test_a_timed_out_command_leaves_no_process(arena: Arena) -> None:
    async with arena.hostile() as box:
        outcome = await sh(box, "yes > /dev/null & (setsid yes > /dev/null &); yes > /dev/null", timeout_s=1)
        assert seen(outcome) == (Reason.TIMEOUT, None, 9)
        assert 0.9 <= outcome.usage.wall_s < PATIENCE_S / 2
        assert await names_inside(box) == []


async def test_cpu_time_over_is_a_timeout_and_sleeping_costs_none(box: Sandbox) -> None:
    spinning = await box.run(shell("while :; do :; done", cpu_s=1, timeout_s=PATIENCE_S))
    assert spinning.reason is Reason.TIMEOUT
    assert spinning.usage.cpu_s > 0.5
    sleeping = await box.run(shell("sleep 1.2; exit 3", cpu_s=1, timeout_s=PATIENCE_S))
    assert seen(sleeping) == (Reason.EXIT, 3, None)


async def test_a_hog_that_asks_for_more_than_the_machine_has_is_refused_or_killed(box: Sandbox) -> None:
    outcome = await box.run(python("a = bytearray(10**11)"))
    if outcome.reason is Reason.EXIT:  # the kernel said no at once: an ordinary failure, and seen as one
        assert outcome.exit_code == 1
        assert b"MemoryError" in outcome.stderr
    else:
        assert_limit_reason(outcome, "memory", Reason.OOM, [Reason.EXIT])
    assert (await sh(box, "true")).ok


async def test_an_oom_kills_the_hog_and_the_session_lives(box: Sandbox) -> None:
    session = "echo started > state; while ! [ -e hog.done ]; do sleep 0.05; done; echo alive"
    async with box.start(shell(session, timeout_s=PATIENCE_S)) as process:
        hog = await box.run(python(HOG))
        assert_limit_reason(hog, "memory", Reason.OOM, [Reason.EXIT])
        await box.write_file("hog.done", b"")
        outcome = await process.wait()
    assert outcome.stdout == b"alive\n"
    assert outcome.exit_code == 0
    assert (await sh(box, "cat state")).stdout == b"started\n"


async def test_a_child_that_dies_of_memory_under_a_command_that_succeeds_is_no_oom(box: Sandbox) -> None:
    outcome = await sh(box, f'python3 -I -S -c "{HOG}" 2>/dev/null; exit 0')
    assert outcome.ok
    assert outcome.usage.oom_kills == (0 if "memory" in outcome.unenforced else 1)


async def test_a_full_disk_is_named_and_seen_inside_as_no_space(box: Sandbox) -> None:
    assert "disk" not in box.unenforced  # its size is the mounts' own: every host enforces it
    full = await sh(box, "dd if=/dev/zero of=f bs=1M count=100")
    assert seen(full) == (Reason.DISK, 1, None)
    assert b"No space left on device" in full.stderr
    assert (await sh(box, "rm f && echo x > g")).ok
    for place in ("/tmp", "/dev/shm"):  # the same account
        assert (await sh(box, f"dd if=/dev/zero of={place}/f bs=1M count=100; s=$?; rm {place}/f; exit $s")).exit_code


async def test_no_free_inode_is_a_full_disk(box: Sandbox) -> None:
    used_up = await sh(box, "i=0; while [ $i -lt 20000 ]; do : > n$i || exit 1; i=$((i+1)); done")
    assert used_up.reason is Reason.DISK


async def test_a_failure_beside_a_disk_that_is_not_full_is_an_exit(box: Sandbox) -> None:
    assert seen(await sh(box, "dd if=/dev/zero of=/usr/f count=1; exit 5")) == (Reason.EXIT, 5, None)


async def test_a_file_over_its_size_is_a_signal_and_not_a_disk(box: Sandbox) -> None:
    assert seen(await sh(box, "exec truncate -s 65M f")) == (Reason.SIGNAL, None, signal.SIGXFSZ)
    assert seen(await sh(box, "truncate -s 63M f; exit 5")) == (Reason.EXIT, 5, None)


async def test_a_refused_fork_is_named(box: Sandbox) -> None:
    outcome = await box.run(python(FORKS))
    assert_limit_reason(outcome, "pids", Reason.PIDS, [Reason.EXIT])
    assert outcome.exit_code == 1
    assert b"refused" in outcome.stderr  # the processes are limited where their limit has no counter, too


async def test_a_full_process_table_is_an_outcome_of_the_next_command_too(box: Sandbox) -> None:
    fill = FORKS.replace("sys.exit(f", 'open("full", "w").close(); time.sleep(600); sys.exit(f')
    async with box.start(python(fill, timeout_s=600)) as process:
        await eventually_file(box, "full")
        outcome = await sh(box, "true")
        if "pids" not in box.unenforced:
            assert (outcome.reason, outcome.exit_code) == (Reason.PIDS, 126)
            assert b"fork" in outcome.stderr
        else:  # counted by RLIMIT_NPROC: the agent itself is not held, the command's own forks are
            assert outcome.reason is Reason.EXIT
        await process.kill()
    assert (await sh(box, "true")).ok


async def test_output_over_the_limit_is_named_and_a_flood_below_it_is_not(box: Sandbox) -> None:
    flood = await box.run(python("while True: print('x' * 99)", output_limit_bytes=1000, timeout_s=PATIENCE_S))
    assert seen(flood) == (Reason.OUTPUT_LIMIT, None, 9)
    on_stderr = await sh(box, "exec yes >&2")
    assert on_stderr.reason is Reason.OUTPUT_LIMIT
    much = await box.run(shell("head -c 900000 /dev/zero; exit 4", output_limit_bytes=1000))
    assert seen(much) == (Reason.EXIT, 4, None)


async def test_what_we_cancel_is_killed(box: Sandbox) -> None:
    async with box.start(Command(argv=("sleep", "600"), timeout_s=600)) as process:
        await process.kill()
        assert seen(await process.wait()) == (Reason.KILLED, None, 9)
    assert await names_inside(box) == []


async def test_a_kill_that_comes_at_once_is_not_lost(box: Sandbox) -> None:
    for _ in range(10):
        async with box.start(Command(argv=("sleep", "600"), timeout_s=600)) as process:
            await process.kill()
            assert (await process.wait()).reason is Reason.KILLED
    assert await names_inside(box) == []


async def test_a_kill_after_the_end_changes_nothing(box: Sandbox) -> None:
    async with box.start(shell("exit 3")) as process:
        first = await process.wait()
        await process.kill()
        assert await process.wait() == first
    assert seen(first) == (Reason.EXIT, 3, None)


async def test_cancelling_a_run_kills_what_it_started(box: Sandbox) -> None:
    with anyio.move_on_after(0.3) as scope:
        await sh(box, "(setsid sleep 600 &) ; sleep 600", timeout_s=600)
    assert scope.cancelled_caught
    assert await names_inside(box) == []


async def test_closing_a_sandbox_ends_its_commands_as_killed(arena: Arena) -> None:
    outcomes: list[Outcome] = []
    async with anyio.create_task_group() as group:
        async with arena.hostile() as box:
            running = anyio.Event()

            async def long() -> None:
                async with box.start(Command(argv=("sleep", "600"), timeout_s=600)) as process:
                    running.set()
                    outcomes.append(await process.wait())

            group.start_soon(long)
            await running.wait()
    assert [outcome.reason for outcome in outcomes] == [Reason.KILLED]


async def test_the_reason_is_of_what_came_first(box: Sandbox) -> None:
    """A flood that would also be late, and a late command that also fills the disk."""
    flood = await box.run(shell("yes", output_limit_bytes=1000, timeout_s=PATIENCE_S))
    assert flood.reason is Reason.OUTPUT_LIMIT
    late = await sh(box, "dd if=/dev/zero of=f bs=1M count=100 2>/dev/null; sleep 600", timeout_s=2)
    assert late.reason is Reason.TIMEOUT


async def eventually_file(box: Sandbox, name: str) -> None:
    """Waits for a file without starting a process."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            try:
                await box.read_file(name, MIB)
                return
            except TransferError:
                await anyio.sleep(0.01)
