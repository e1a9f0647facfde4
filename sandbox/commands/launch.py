"""What a command's start is made of: its request, and the pipes that become its standard streams.

Owns: nothing. Invariant: what cannot go together is refused before a pipe is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sandbox.cgroup import files
from sandbox.commands.process import Process
from sandbox.commands.rlimits import cpu_items
from sandbox.commands.shell import Shell
from sandbox.errors import ConfigError, ProtocolError
from sandbox.exhaustion import fault
from sandbox.protocol.line import Line
from sandbox.protocol.wire import MAX_FDS, MAX_STRINGS, Item, Kind, Tag, encode, number, text
from sandbox.types import Command

MINIMAL_ENV = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
"""Of every command, under what image and spec add."""


def check_modes(command: Command, num_fds: int, stdin: str, output: str) -> None:
    """Raises ConfigError for modes that there are not, or that ask for a stream which is passed or given already."""
    if stdin not in ("bytes", "pipe"):
        raise ConfigError("start.stdin", stdin, "must be bytes or pipe")
    if output not in ("collect", "stream"):
        raise ConfigError("start.output", output, "must be collect or stream")
    if stdin == "pipe" and (command.stdin or num_fds > 0):
        raise ConfigError("start.stdin", stdin, "leave command.stdin empty and pass no descriptor for it")
    if output == "stream" and num_fds > 2:
        raise ConfigError("start.output", output, "pass no descriptors for both stdout and stderr")


def run_frame(
    ident: int, command: Command, env: Mapping[str, str], limits: Sequence[Item], num_stdio: int, *, keeper: bool
) -> bytes:
    """The request to run a command.

    Args:
        env: the sandbox's own variables, below the command's.
        keeper: keep its descendants together, where no cgroup does.

    Raises:
        ConfigError: it is too long, or has too many words.
    """
    shell = command if isinstance(command, Shell) else None
    variables = command.env if shell is not None and shell.whole_env else {**env, **command.env}
    if len(variables) + len(command.argv) >= MAX_STRINGS:
        raise ConfigError("command.argv", f"{len(command.argv)} words", f"at most {MAX_STRINGS} words and variables")
    items = [text(Tag.ARGV, word) for word in command.argv]
    items += [text(Tag.ENV, f"{name}={value}") for name, value in variables.items()]
    items += [text(Tag.CWD, command.cwd), number(Tag.STDIO, num_stdio), *limits, *cpu_items(command.cpu_s)]
    if shell is not None:
        items.append(number(Tag.HOLDER, 1 + shell.terminal))
    if keeper or shell is not None:  # below one keeper, what a session started is told from what others did
        items.append(number(Tag.KEEPER, 1))
    try:
        return encode(Kind.RUN, ident, items)
    except ProtocolError as error:
        raise ConfigError("command.argv", f"{len(command.argv)} words", str(error)) from None


async def send_run(
    link: Line,
    frame: bytes,
    process: Process,
    command: Command,
    fds: Sequence[int],
    joins: Sequence[str],
    *,
    piped: bool,
) -> None:
    """Sends a request to run with its descriptors: the standard streams, and the cgroups to join.

    Args:
        joins: `cgroup.procs` files.
        piped: the caller will write to the command's stdin.

    Raises:
        ConfigError: more descriptors than a frame carries.
        SandboxDiedError: the sandbox has ended.
        SandboxError: no descriptors are left.
    """
    theirs: list[int] = []
    try:
        attached = _attach_stdio(process, command, fds, theirs, piped)
        for path in joins:
            with files.vanishing():
                theirs.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
            attached.append(theirs[-1])
        if len(attached) > MAX_FDS:
            raise ConfigError("fds", len(fds), f"at most {MAX_FDS - 5} descriptors")
        await link.send(frame, attached)
    except OSError as error:
        raise fault("no descriptors for a command", error.errno) from error
    finally:
        for fd in theirs:
            os.close(fd)


def _attach_stdio(process: Process, command: Command, fds: Sequence[int], theirs: list[int], piped: bool) -> list[int]:
    """The descriptors that become the command's 0, 1, 2 …: those passed, and pipes for the rest.

    `theirs` gets the ends that were made here for the command, to be closed once they are sent.
    """
    attached = list(fds)
    for index in range(len(fds), 3):
        if index == 0 and not command.stdin and not piped:
            child = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        elif index == 0:
            child, ours = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(ours, False)
            if piped:
                process.open_stdin(ours)
            else:
                process.feed(ours)
        else:
            ours, child = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(ours, False)
            process.attach(index, ours)
        theirs.append(child)
        attached.append(child)
    return attached
