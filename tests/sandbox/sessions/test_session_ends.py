"""Runs that are ended early: who dies, who is spared, and when the session goes as well."""

from __future__ import annotations

import time

import anyio
import pytest

from sandbox.errors import SandboxDiedError, SandboxFrozenError
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.sessions import holder
from sandbox.sessions.session import Session
from sandbox.types import MIB, Command, JailName, Reason, SandboxSpec
from tests.sandbox.sessions.conftest import LIMITS
from tests.sandbox.sessions.inside import names_become

pytestmark = pytest.mark.anyio
SHORT_S = 0.2


async def still_works(session: Session) -> None:
    outcome = await session.run("echo still here; cd /workspace")
    assert (outcome.reason, outcome.exit_code, outcome.stdout) == (Reason.EXIT, 0, b"still here\n"), outcome


@pytest.mark.parametrize("shell", ["bash", "sh"])
async def test_a_timeout_interrupts_what_runs_and_spares_shell_and_earlier_jobs(any_box: Sandbox, shell: str) -> None:
    async with any_box.session(shell=shell) as session:  # type: ignore[arg-type]
        await session.run("kept=1; sleep 61 >/dev/null 2>&1 & :")
        await session.run("(setsid sh -c 'sleep 62; :' >/dev/null 2>&1 &)")
        for script in (
            "echo begun; sleep 50; echo not reached",
            "echo begun; while :; do :; done; echo not reached",
            "echo begun; sleep 50 | cat; echo not reached",
            "echo begun; f() { sleep 50; echo not reached; }; f; echo not reached",
            "echo begun; sleep 51 & sleep 52 & wait; echo not reached",
            "echo begun; setsid -w sleep 50 || setsid sleep 53 & wait; echo not reached",
            "echo begun; read x < <(sleep 50); echo not reached" if session.bash else "echo begun; sleep 50",
            "echo begun; kill -STOP $$; sleep 50",
        ):
            outcome = await session.run(script, timeout_s=SHORT_S)
            assert (outcome.reason, outcome.stdout) == (Reason.TIMEOUT, b"begun\n"), (script, outcome)
            assert outcome.usage.wall_s < 10
            await names_become(any_box, shell.encode() if shell == "bash" else b"sh", b"sh", b"sleep", b"sleep")
        assert (await session.run("echo $kept")).stdout == b"1\n"


async def test_what_ignores_the_interrupt_is_killed(any_box: Sandbox) -> None:
    async with any_box.session() as session:
        ignoring = "trap '' INT TERM HUP; echo begun; while :; do sleep 1; done"
        outcome = await session.run(f'sh -c "{ignoring}" & sh -c "{ignoring}"', timeout_s=SHORT_S)
        assert (outcome.reason, outcome.signal) == (Reason.TIMEOUT, None)
        assert session.alive
        await names_become(any_box, b"bash")
        await still_works(session)
        await session.run("trap '' INT; sleep 50", timeout_s=SHORT_S)
        await session.run("trap - INT")
        await still_works(session)


async def test_a_shell_that_cannot_be_brought_back_ends_its_session(any_box: Sandbox) -> None:
    async with any_box.session() as session:
        await session.run("sleep 50 >/dev/null 2>&1 & :")
        began_s = time.monotonic()
        outcome = await session.run("trap '' INT; echo begun; while :; do :; done", timeout_s=SHORT_S)
        assert time.monotonic() - began_s < 15
        assert (outcome.reason, outcome.exit_code, outcome.stdout) == (Reason.TIMEOUT, None, b"begun\n"), outcome
        assert not session.alive
        await names_become(any_box)
        with pytest.raises(SandboxDiedError):
            await session.run("true")


async def test_a_flood_is_ended_as_a_timeout_is(session: Session) -> None:
    for script in ("yes", "while :; do echo y; done", "cat /dev/zero >&2"):
        outcome = await session.run(script, output_limit_bytes=1000, kill_output_bytes=MIB // 4, timeout_s=60)
        assert (outcome.reason, outcome.signal) == (Reason.OUTPUT_LIMIT, None), (script, outcome)
        assert outcome.stdout_truncated_bytes + outcome.stderr_truncated_bytes >= MIB // 4 - 1000
        await still_works(session)


async def test_a_cancelled_run_is_ended_first(any_box: Sandbox) -> None:
    async with any_box.session() as session:
        with anyio.move_on_after(SHORT_S):
            await session.run("sleep 50 & sleep 51")
        assert session.alive
        await names_become(any_box, b"bash")
        await still_works(session)


async def test_leaving_the_context_ends_every_job(any_box: Sandbox) -> None:
    async with any_box.session() as session:
        await session.run("sleep 50 & setsid sleep 51 & (trap '' INT TERM HUP; sleep 52; :) & :")
    await names_become(any_box)
    async with any_box.session() as session:
        await session.run("sleep 50 >/dev/null 2>&1 & exit 3")
        assert not session.alive
        await names_become(any_box)


async def test_who_kills_all_that_it_sees_ends_its_own_session_alone(any_box: Sandbox) -> None:
    async with any_box.session() as other, any_box.session() as session:
        outcome = await session.run("sleep 50 & kill -9 $PPID; sleep 51", timeout_s=20)
        assert (outcome.reason, outcome.exit_code, outcome.signal) == (Reason.SIGNAL, None, 9), outcome
        assert not session.alive
        await still_works(other)
        await names_become(any_box, b"bash")


async def test_a_session_whose_holder_is_killed_ends(any_box: Sandbox) -> None:
    script = (
        "for p in /proc/[0-9]*; do read -r n <$p/comm; [ $n = rollout-holder ] && kill -9 ${p#/proc/}; done; echo done"
    )
    async with any_box.session() as session:
        outcome = await session.run(script)
        assert (outcome.reason, outcome.stdout) == (Reason.EXIT, b"done\n")
        if session.alive:  # without cgroups it was missed at the end of that run already
            outcome = await session.run("true")
            assert (outcome.reason, outcome.exit_code, outcome.signal) == (Reason.SIGNAL, None, 9), outcome
        assert not session.alive
        await names_become(any_box)
        with pytest.raises(SandboxDiedError):
            await session.run("true")
    async with any_box.session() as session:
        outcome = await session.run(f"{script}; sleep 50", timeout_s=SHORT_S)
        assert (outcome.reason, outcome.signal) == (Reason.TIMEOUT, 9)


async def test_a_stopped_holder_delays_the_end_by_its_deadline_alone(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "_ANSWER_S", 0.5)
    stop = "for p in /proc/[0-9]*; do read -r n <$p/comm; [ $n = rollout-holder ] && kill -STOP ${p#/proc/}; done"
    async with box.session() as session:
        outcome = await session.run(f"{stop}; sleep 50", timeout_s=SHORT_S)
        assert (outcome.reason, outcome.signal) == (Reason.TIMEOUT, 9)
        assert outcome.usage.wall_s < 10
        await names_become(box)


async def test_what_leaves_no_room_for_a_process_is_ended(any_box: Sandbox) -> None:
    async with any_box.session() as session:
        outcome = await session.run("while :; do sleep 50 & done", timeout_s=0.5)
        assert outcome.reason is Reason.TIMEOUT
        if session.alive:
            await still_works(session)
        await names_become(any_box, *([b"bash"] if session.alive else []))


async def test_monitor_mode_changes_nothing_of_that(any_box: Sandbox) -> None:
    async with any_box.session() as session:
        await session.run("set -m; sleep 61 >/dev/null 2>&1 &")
        for script in ("sleep 50", "sleep 51 & sleep 52", "sleep 50 | cat"):
            outcome = await session.run(script, timeout_s=SHORT_S)
            assert outcome.reason is Reason.TIMEOUT
            await names_become(any_box, b"bash", b"sleep")


async def test_who_speaks_in_the_shells_place_ends_the_session(session: Session) -> None:
    outcome = await session.run("for n in 10 11 12 13; do echo 7 0 >&$n; echo hello >&$n; done 2>/dev/null; sleep 50")
    assert (outcome.reason, outcome.signal) == (Reason.SIGNAL, 9)
    assert b"own descriptor" in outcome.stderr
    assert not session.alive


async def test_a_closed_sandbox_ends_the_run_as_killed(host: SandboxHost, jail: JailName) -> None:
    async with host.acquire(SandboxSpec(limits=LIMITS, jail=jail)) as box, box.session() as session:
        async with anyio.create_task_group() as group:

            async def close_soon() -> None:
                await anyio.sleep(SHORT_S)
                box.close()

            group.start_soon(close_soon)
            outcome = await session.run("echo begun; sleep 50")
        assert (outcome.reason, outcome.stdout) == (Reason.KILLED, b"begun\n")
        assert not session.alive
        assert box._kept.disown() == []
        with pytest.raises(SandboxDiedError):
            await session.run("true")


async def test_a_dead_sandbox_is_a_fault(host: SandboxHost, jail: JailName) -> None:
    async with host.acquire(SandboxSpec(limits=LIMITS, jail=jail)) as box, box.session() as session:
        async with anyio.create_task_group() as group:

            async def die_soon() -> None:
                await anyio.sleep(SHORT_S)
                box.mark_dead("the test ends it")

            group.start_soon(die_soon)
            with pytest.raises(SandboxDiedError, match="the test ends it"):
                await session.run("sleep 50")


async def test_a_frozen_sandbox_takes_no_run_and_its_timeout_comes_all_the_same(box: Sandbox) -> None:
    if box._freezer._directory is None:
        pytest.skip("no freezer: this host has no cgroup v2 tree")
    async with box.session() as session:
        await session.run("x=1")
        await box.freeze()
        with pytest.raises(SandboxFrozenError):
            await session.run("true")
        await box.thaw()
        assert (await session.run("echo $x")).stdout == b"1\n"
        async with anyio.create_task_group() as group:

            async def freeze_soon() -> None:
                await anyio.sleep(0.1)
                await box.freeze()

            group.start_soon(freeze_soon)
            outcome = await session.run("sleep 50", timeout_s=0.5)
        assert outcome.reason is Reason.TIMEOUT
        assert not session.alive
        await box.thaw()


async def test_a_fork_bomb_costs_its_session_at_most(any_box: Sandbox) -> None:
    async with any_box.session() as session:
        outcome = await session.run("b() { b | b & }; b; while :; do b; sleep 0.01; done", timeout_s=1)
        assert outcome.reason in (Reason.TIMEOUT, Reason.OUTPUT_LIMIT), outcome
    await names_become(any_box)
    assert (await any_box.run(Command(argv=("echo", "fine")))).stdout == b"fine\n"


async def test_usage_is_each_runs_own(box: Sandbox) -> None:
    async with box.session() as session:
        busy = await session.run("i=0; while [ $i -lt 40000 ]; do i=$((i + 1)); done")
        quiet = await session.run("true")
        assert busy.usage.cpu_s > 0.04 > quiet.usage.cpu_s
        assert busy.usage.wall_s > quiet.usage.wall_s > 0
        if "memory" in box.unenforced:
            return
        hog = await session.run("head -c 300000000 /dev/zero | tail -c 290000000 >/dev/null; (exit ${PIPESTATUS[1]})")
        assert (hog.reason, hog.exit_code) == (Reason.OOM, 137), hog
        assert (await session.run("(exit 3)")).reason is Reason.EXIT
        full = await session.run("head -c 100000000 /dev/zero > full")
        assert full.reason is Reason.DISK, full
        await session.run("rm full")
        assert (await session.run("false")).reason is Reason.EXIT
