"""A session's start and end.

Owns: the sockets until the session has them. Invariant: leaving a session leaves nothing of what it started, and no
descriptor; a shell that does not come up is the image's lack, told by name.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from typing import Protocol

from sandbox.cgroup.types import CgroupSet
from sandbox.commands.kept import KeptStreams
from sandbox.commands.process import Process
from sandbox.commands.shell import Shell
from sandbox.errors import ConfigError, SandboxError
from sandbox.sessions.control import Control
from sandbox.sessions.dialect import BASH_SETUP, HELLO, Report, start_words
from sandbox.sessions.holder import Holder
from sandbox.sessions.session import Home, Session
from sandbox.sessions.terminal import Terminal
from sandbox.sessions.types import SHELL_NAMES, ShellName, Size, check_shell
from sandbox.types import Command, SandboxSpec

START_S = 20.0
MAX_S = 86_400.0
"""A session lives that long at most."""
NO_PAGER = {"PAGER": "cat", "GIT_PAGER": "cat", "MANPAGER": "cat", "SYSTEMD_PAGER": "cat"}
_NOT_FOUND = 127


class Starter(Home, Protocol):
    """`Sandbox`, as far as a session needs it."""

    spec: SandboxSpec

    def start(self, command: Command, fds: Sequence[int]) -> AbstractAsyncContextManager[Process]:
        """Starts a command with these descriptors."""


def _environment(env: Mapping[str, str] | None, own: Mapping[str, str], pty: Size | None) -> dict[str, str]:
    if env is not None:
        return dict(env)
    defaults = {**NO_PAGER, "TERM": "dumb" if pty is None else "xterm"}
    return {name: value for name, value in defaults.items() if name not in own}


@asynccontextmanager
async def open_session(
    home: Starter,
    cgroups: CgroupSet,
    kept: KeptStreams,
    *,
    shell: ShellName | None = None,
    cwd: str = "/workspace",
    env: Mapping[str, str] | None = None,
    pty: Size | None = None,
) -> AsyncIterator[Session]:
    """A persistent shell; leaving kills all that it started, background jobs too.

    Args:
        shell: None for bash where the image has it, else sh.
        cwd: where it starts.
        env: all of its variables, as `Session.state` gives them; None for a command's, and no pager.
        pty: the size of a terminal that it gets, for job control and for what looks for one; None for pipes.

    Raises:
        ConfigError: a value cannot be used, or the image has no such shell.
        SandboxDiedError, SandboxFrozenError: as of `Sandbox.start`.
        SandboxError: the shell does not come up, or no descriptors are left.
    """
    name = check_shell(shell)
    for one in SHELL_NAMES if name is None else (name,):
        command = Shell(
            argv=start_words(one),
            cwd=cwd,
            env=_environment(env, home.spec.env, pty),
            whole_env=env is not None,
            terminal=pty is not None,
            timeout_s=MAX_S,
        )
        async with _start(home, cgroups, kept, command, pty) as session:
            if session is not None:
                yield session
                return
    raise ConfigError("session.shell", shell, "the image has no such shell")


@asynccontextmanager
async def _start(
    home: Starter, cgroups: CgroupSet, kept: KeptStreams, command: Shell, pty: Size | None
) -> AsyncIterator[Session | None]:
    """A session of that shell; None where the image has none."""
    with ExitStack() as ends:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends.callback(ours.close)
            ends.enter_context(theirs)
            held, holders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends.callback(held.close)
            ends.enter_context(holders)
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            ends.callback(os.close, null)
        except OSError as error:
            raise SandboxError(f"no descriptors for a session: {error.strerror}") from error
        terminal = None if pty is None else Terminal(pty)
        if terminal is not None:
            ends.callback(terminal.close)
        streams = [null] * 2 if terminal is None else [terminal.inner] * 3
        async with home.start(command, [theirs.fileno(), *streams, holders.fileno()]) as process:
            session = Session(home, process, Holder(held, lambda: home.frozen), cgroups, kept, terminal)
            try:
                theirs.close()
                holders.close()
                process.companion = session
                found = await _greet(session, process, ours)
                if found and terminal is not None:
                    await session.settle_in()
                yield session if found else None
            finally:
                await session.aclose()


async def _greet(session: Session, process: Process, end: socket.socket) -> bool:
    """Waits until the shell speaks; False where there is none."""
    greeting: list[Report] = []

    def on_report(report: Report) -> None:
        if greeting:
            session.reported(report)
        else:
            greeting.append(report)
            session.ended()

    control = Control(end, on_report, session.spoiled)
    session.connect(control)
    control.say(HELLO)
    await session.until(lambda: bool(greeting) or not process.running, START_S)
    if not greeting and not process.running and (await process.wait()).exit_code == _NOT_FOUND:
        return False
    if not greeting:
        raise SandboxError("a session's shell did not come up")
    session.bash = greeting[0].status == 1
    if session.bash:
        control.say(BASH_SETUP)
    return True
