"""One child process of a run: started with its descriptors, watched, ended.

Invariant: a child holds the read end of a pipe whose only write end is ours, so that it sees EOF
and exits by itself however we die; and when we leave normally, it is gone before we go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import Process

from rollout.errors import Fault

STOP_GRACE_S = 3.0
"""Seconds between asking a child to end (EOF on its parent pipe) and SIGKILL."""

LOG_TAIL_BYTES = 4096


class Child:
    """A running child process.

    Args:
        name: what the child is, for messages (`learner`, `policy server`).
        process: the started process.
        log_path: where its stderr goes.
        fault: the kind of fault that its unexpected end is.
    """

    def __init__(self, name: str, process: Process, log_path: Path, fault: type[Fault]) -> None:
        self.name = name
        self.process = process
        self._log_path = log_path
        self._fault = fault
        self._may_end = False

    def expect_end(self) -> None:
        """From now on an exit with status 0 is no fault."""
        self._may_end = True

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    async def watch(self) -> None:
        """Waits for the child's end, which is a fault unless it was expected.

        Raises:
            Fault: the child ended; carries how, and the end of its log.
        """
        status = await self.process.wait()
        if status == 0 and self._may_end:
            return
        raise self._fault(f"the {self.name} ended: {describe_status(status)}{self._log_tail()}")

    def _log_tail(self) -> str:
        try:
            text = self._log_path.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", "replace").strip()
        except OSError as error:
            return f" (its log {self._log_path} cannot be read: {error})"
        return f"\n--- end of {self._log_path}\n{text}" if text else f" (its log {self._log_path} is empty)"


def describe_status(status: int) -> str:
    """`exit status 1`, or `killed by SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


@asynccontextmanager
async def start_child(
    name: str,
    argv: Callable[[int], Sequence[str]],
    *,
    log_path: Path,
    fault: type[Fault],
    pass_fds: Sequence[int] = (),
    env: dict[str, str] | None = None,
) -> AsyncIterator[Child]:
    """Starts a child and ends it on leaving the block.

    Args:
        argv: makes the command line, given the descriptor number of the parent pipe's read end.
        log_path: file that stderr is appended to; stdout is a pipe for the child's ready line.
        pass_fds: further descriptors that the child inherits under the same numbers.
        env: additions to our own environment.

    The child runs in a session of its own: Ctrl-C in a terminal reaches us alone, and we decide.
    """
    read_end, write_end = os.pipe()
    try:
        with log_path.open("ab") as log:
            process = await anyio.open_process(
                list(argv(read_end)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[read_end, *pass_fds],
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    child = Child(name, process, log_path, fault)
    try:
        yield child
    finally:
        os.close(write_end)
        with anyio.CancelScope(shield=True):
            await _end(process)


async def _end(process: Process) -> None:
    with anyio.move_on_after(STOP_GRACE_S):
        await process.wait()
        return
    # A child that ignores EOF for this long is stuck: its whole session goes.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
