"""What one session can hand to another, and which shell is found."""

from __future__ import annotations

import pytest

from sandbox.errors import ConfigError, SandboxDiedError
from sandbox.sandbox import Sandbox
from sandbox.sessions.session import Session
from sandbox.sessions.types import Size

pytestmark = pytest.mark.anyio


async def test_a_session_starts_from_anothers_directory_and_variables(box: Sandbox, session: Session) -> None:
    await session.run("mkdir -p deep/er; cd deep; cd er; export A='with\nlines' B=$'\\xff'; unset PYTHONHASHSEED; c=3")
    await session.run("export -n GIT_PAGER; f() { echo exported; }; export -f f 2>/dev/null; (exit 6)")
    state = await session.state()
    assert state.cwd == "/workspace/deep/er"
    assert (state.env["A"], state.env["B"], state.env["PAGER"]) == ("with\nlines", "\udcff", "cat")
    assert not {"c", "_", "PYTHONHASHSEED", "POSIXLY_CORRECT"} & set(state.env)
    assert (await session.run("echo $?")).stdout == b"6\n"
    async with box.session(cwd=state.cwd, env=state.env) as other:
        outcome = await other.run('pwd; echo "$A"; printf %s "$B"; echo ${PYTHONHASHSEED-unset} ${c-unset}; f')
        assert outcome.stdout == b"/workspace/deep/er\nwith\nlines\n\xffunset unset\nexported\n"
        again = await other.state()
        same = set(state.env) - {"SHLVL", "OLDPWD"}
        assert {name: again.env[name] for name in same} == {name: state.env[name] for name in same}


async def test_a_deleted_directory_is_given_as_the_workspace(box: Sandbox, session: Session) -> None:
    await session.run("mkdir here; cd here; rmdir ../here")
    assert (await session.state()).cwd == "/workspace"
    await session.run("mkdir /workspace/here")  # another of that name
    assert (await session.state()).cwd == "/workspace"
    assert (await session.run("cd /tmp; true")).ok
    assert (await session.state()).cwd == "/tmp"


async def test_the_state_is_read_whatever_functions_and_path_there_are(session: Session) -> None:
    await session.run("cat() { :; }; command() { :; }; exec 9>&1; PATH=/nowhere; set -a; set -e")
    assert (await session.state()).env["PATH"] == "/nowhere"
    assert session.alive
    await session.run("export BIG=$(printf '%0200000d' 1)")
    await session.run("exit")
    with pytest.raises(SandboxDiedError):
        await session.state()


async def test_a_session_has_no_pager_and_a_plain_terminal_type(box: Sandbox, session: Session) -> None:
    assert (await session.run("echo $PAGER $GIT_PAGER $TERM; [ -t 1 ]")).stdout == b"cat cat dumb\n"
    async with box.session(pty=Size()) as other:
        assert (await other.run("echo $PAGER $TERM")).stdout == b"cat xterm\r\n"


async def test_bash_where_there_is_one_else_sh(box: Sandbox) -> None:
    await box.write_file("only/.keep", b"")
    async with box.session(shell="sh") as session:
        await session.run("ln -s $(command -v dash || command -v sh) only/sh; ln -s /bin/echo only/echo")
    async with box.session(env={"PATH": "/workspace/only"}) as session:
        assert not session.bash
        assert (await session.run("echo $0")).stdout == b"sh\n"
    with pytest.raises(ConfigError, match="no such shell"):
        async with box.session(shell="bash", env={"PATH": "/workspace/only"}):
            pass
    with pytest.raises(ConfigError, match=r"session\.shell"):
        async with box.session(shell="fish"):  # type: ignore[arg-type]
            pass
    with pytest.raises(ConfigError, match=r"command\.cwd"):
        async with box.session(cwd="relative"):
            pass


async def test_nothing_is_remembered_in_files(box: Sandbox) -> None:
    async with box.session() as session:
        await session.run("echo a; set -o history; history -s b; :")
        await session.run("exit")
    async with box.session() as session:
        assert (await session.run("ls -A /workspace")).stdout == b""
