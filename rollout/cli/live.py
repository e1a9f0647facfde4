"""One command in a fresh sandbox, with this process's own standard streams.

Owns: the sandbox while the command runs. Invariant: input is passed on and output is shown as it comes, in pieces, so
that neither is ever held whole; nothing is left running when it ends, whatever ends it.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from pathlib import Path

import anyio

from rollout.cli.output import OutputError, ReaderGoneError, write_descriptor
from sandbox.commands.process import Process
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.loop import run_on_loop
from sandbox.sandbox import Sandbox
from sandbox.types import KIB, Command, Outcome, SandboxSpec, Skipped

_PUMP_BYTES = 64 * KIB
_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_PATIENCE_S = 0.1


def run_once(
    state_dir: Path | None,
    spec: SandboxSpec,
    command: Command,
    files: list[tuple[str, bytes]],
    *,
    has_stdin: bool,
    live: bool,
) -> tuple[Outcome, tuple[Skipped, ...]]:
    """Runs the command to its end; its outcome, and what of the workspace was left out.

    Args:
        files: path inside and content of what is written before it starts.
        has_stdin: pass our standard input on.
        live: show its output: the head of each stream as it comes, what is kept of the rest at the end.

    Raises:
        OutputError: our stdout or stderr cannot be written.
        ReaderGoneError: nobody reads it.
    """

    async def run() -> tuple[Outcome, tuple[Skipped, ...]]:
        async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir) if state_dir else None)) as host:
            async with host.acquire(spec) as box:
                for path, data in files:
                    await box.write_file(path, data)
                reading = _stdin_pipe() if has_stdin else None
                try:
                    outcome = await _run(box, command, () if reading is None else (reading,), live)
                    return outcome, box.workspace_skipped
                finally:
                    if reading is not None:
                        os.close(reading)

    return run_on_loop(run)


async def _run(box: Sandbox, command: Command, fds: tuple[int, ...], live: bool) -> Outcome:
    async with box.start(command, fds, output="stream" if live else "collect") as process:
        shown = await _show(process, command) if live else {}
        outcome = await process.wait()
    if live:
        await _write("stdout", outcome.stdout[shown["stdout"] :])
        await _write("stderr", outcome.stderr[shown["stderr"] :])
    return outcome


async def _show(process: Process, command: Command) -> dict[str, int]:
    """Shows the head of each stream; how much of it that was."""
    head_bytes = command.output_limit_bytes - command.output_limit_bytes // 2
    shown = dict.fromkeys(_DESCRIPTORS, 0)
    async for piece in process.output():
        data = piece.data[: head_bytes - shown[piece.stream]]
        if data:
            shown[piece.stream] += len(data)
            await _write(piece.stream, data)
    return shown


async def _write(stream: str, data: bytes) -> None:
    """Writes all of `data` to our own stream, however slowly it is read. Cancelled, nothing more is written."""
    given_up = threading.Event()
    try:
        await anyio.to_thread.run_sync(_write_patiently, _DESCRIPTORS[stream], data, given_up, abandon_on_cancel=True)
    except BrokenPipeError:
        raise ReaderGoneError from None
    except OSError as error:
        raise OutputError(f"{stream} cannot be written: {error.strerror}") from None
    finally:
        given_up.set()


def _write_patiently(descriptor: int, data: bytes, given_up: threading.Event) -> None:
    """Never blocks in a write (a pipe that is ready takes `PIPE_BUF` bytes), so that it can be given up."""
    view = memoryview(data)
    while view and not given_up.is_set():
        if select.select([], [descriptor], [], _PATIENCE_S)[1]:
            view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]


def _stdin_pipe() -> int:
    """The reading end of a pipe that carries our standard input as it comes.

    A pipe, since a descriptor of our own could be opened again, for writing, from inside. The thread that feeds it
    may wait for input for ever, and dies with this process.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    threading.Thread(target=_pump, args=(sys.stdin.fileno(), writing), daemon=True, name="stdin").start()
    return reading


def _pump(source: int, target: int) -> None:
    try:
        while data := os.read(source, _PUMP_BYTES):
            write_descriptor(target, data)
    except OSError:
        return  # the command does not read any more, or our input is not readable
    finally:
        os.close(target)
