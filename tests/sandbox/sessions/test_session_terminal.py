"""A session on a terminal: size, job control, typed input, and what does not outlast a run."""

from __future__ import annotations

import anyio
import pytest

from sandbox.errors import ConfigError
from sandbox.sandbox import Sandbox
from sandbox.sessions.session import Session
from sandbox.sessions.types import Size
from sandbox.types import Reason
from tests.sandbox.sessions.inside import names_become

pytestmark = pytest.mark.anyio
SIZE = Size(30, 100)


async def shown(session: Session, script: str, **options: object) -> bytes:
    """What the terminal shows of a script that ends well."""
    outcome = await session.run(script, **options)  # type: ignore[arg-type]
    assert outcome.ok, outcome
    return outcome.stdout.replace(b"\r\n", b"\n")


async def test_a_terminal_has_its_size_and_tells_of_another(box: Sandbox) -> None:
    async with box.session(pty=SIZE) as session:
        assert await shown(session, "stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all") == b"30 100\nall\n"
        session.resize(Size(10, 20))
        assert await shown(session, "stty size") == b"10 20\n"
        async with anyio.create_task_group() as group:

            async def soon() -> None:
                await anyio.sleep(0.2)
                session.resize(Size(11, 21))

            group.start_soon(soon)
            script = "import os, signal; signal.signal(signal.SIGWINCH, lambda *_: print(*os.get_terminal_size())); "
            told = await shown(session, f"python3 -c '{script}signal.pause()'")
            assert told == b"21 11\n"


async def test_both_streams_are_shown_in_order_and_no_prompt(box: Sandbox) -> None:
    async with box.session(pty=SIZE) as session:
        assert await shown(session, "") == b""
        script = "for i in 1 2 3; do echo out $i; echo err $i >&2; done; printf end"
        for _ in range(20):
            assert await shown(session, script) == b"out 1\nerr 1\nout 2\nerr 2\nout 3\nerr 3\nend"
        assert len(await shown(session, "seq 100000")) == 588_895
        await session.run("PS1=loud; PS2=louder; PROMPT_COMMAND='echo prompt'; set -v")
        assert (await session.run("set +v")).stdout.count(b"loud") == 0


@pytest.mark.parametrize("shell", ["bash", "sh"])
async def test_jobs_are_controlled(any_box: Sandbox, shell: str) -> None:
    async with any_box.session(pty=SIZE, shell=shell) as session:  # type: ignore[arg-type]
        outcome = await session.run("sh -c 'kill -TSTP $$; echo resumed'")
        assert outcome.exit_code == 148, outcome
        assert b"topped" in await shown(session, "jobs")
        assert b"resumed\n" in await shown(session, "fg")
        await session.run("sleep 50 &")
        outcome = await session.run("sleep 51 & fg", timeout_s=0.3)
        assert (outcome.reason, outcome.exit_code) == (Reason.TIMEOUT, 130), outcome
        await names_become(any_box, shell.encode(), b"sleep")
        assert b"unning" in await shown(session, "jobs")
        outcome = await session.run("cat & sleep 0.2; jobs; kill %%")  # a background job may not read the terminal
        assert b"topped" in outcome.stdout, outcome
        assert await shown(session, "echo on") == b"on\n"
    await names_become(any_box)


async def test_what_is_typed_is_read_and_what_is_not_read_is_gone(box: Sandbox) -> None:
    async with box.session(pty=SIZE) as session:
        assert await shown(session, "read -r x; echo got $x", stdin=b"first\nsecond\n") == (
            b"first\nsecond\ngot first\n"
        )
        outcome = await session.run("read -r x; echo got $x", timeout_s=0.3)
        assert (outcome.reason, outcome.exit_code) == (Reason.TIMEOUT, 130)
        with pytest.raises(ConfigError, match="during a run"):
            session.type(b"no")
        async with anyio.create_task_group() as group:

            async def soon() -> None:
                await anyio.sleep(0.2)
                session.type(b"late\n")
                await anyio.sleep(0.2)
                session.type(b"\x03")

            group.start_soon(soon)
            outcome = await session.run("read -r x; echo got $x; sleep 50", timeout_s=20)
        assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 130), outcome
        assert b"got late" in outcome.stdout
        assert await shown(session, "cat", stdin=b"line\n\x04") == b"line\nline\n"


async def test_modes_and_a_stopped_output_do_not_outlast_a_run(box: Sandbox) -> None:
    async with box.session(pty=SIZE) as session:
        before = await shown(session, "stty -g")
        await session.run("stty raw -echo olcuc; printf '\\033[?1049h'")
        assert await shown(session, "stty -g") == before
        outcome = await session.run(
            "stty -ixon; python3 -c 'import termios; termios.tcflow(1, termios.TCOOFF)'; echo x", timeout_s=0.5
        )
        assert outcome.reason in (Reason.EXIT, Reason.TIMEOUT)
        assert b"on\n" in await shown(session, "echo on")


async def test_no_input_can_be_planted_on_the_terminal(box: Sandbox) -> None:
    plant = "import fcntl; fcntl.ioctl(0, {}, b'x')"
    async with box.session(pty=SIZE) as session:
        for request in ("0x5412", "0x541C"):  # TIOCSTI, TIOCLINUX
            outcome = await session.run(f'python3 -c "{plant.format(request)}"')
            assert b"Operation not permitted" in outcome.stdout, outcome


async def test_a_background_flood_waits_for_a_reader(box: Sandbox) -> None:
    async with box.session(pty=SIZE) as session:
        await session.run("yes &")
        for _ in range(3):
            outcome = await session.run("echo here", output_limit_bytes=1000)
            assert outcome.reason in (Reason.EXIT, Reason.OUTPUT_LIMIT), outcome
        await session.run("kill %1")
        outcome = await session.run("echo after")
        assert outcome.stdout.endswith(b"after\r\n")
        assert session.alive


async def test_only_a_terminal_has_a_size(session: Session) -> None:
    with pytest.raises(ConfigError, match="pty"):
        session.resize(SIZE)
    with pytest.raises(ConfigError, match=r"size\.rows"):
        Size(0, 3)
