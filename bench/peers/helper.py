"""Peers that run in a process of their own, which does batches of their operation and tells how long each took.

Owns that process. Invariants: it answers within a deadline or is killed with all that it started in its group; it
ends with the benchmark, for it reads from a pipe; what it writes beside its answers reaches no terminal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from bench.records import CannotMeasure
from bench.rounds import Batch

START_S = 60.0
"""Until a helper is ready: some import half of PyPI."""
ANSWER_S = 60.0
"""Beyond its slice, for a batch."""
_CLOSE_S = 10.0
_ROOT = Path(__file__).resolve().parents[2]
_BOOT = """
import runpy, sys
sys.path.append(sys.argv.pop(1))  # after the interpreter's own packages, which may have names of ours
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class _Answer(msgspec.Struct):
    samples_s: list[float] = []
    wall_s: float = 0.0
    error: str = ""


class HelperPeer:
    """A peer whose batches are measured in its helper. Made by `open_helper`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, stderr: IO[bytes], answer_s: float) -> None:
        self.name = name
        self._process = process
        self._stderr = stderr
        self._answer_s = answer_s

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """One batch.

        Raises:
            CannotMeasure: the operation failed, or the helper ended or took too long (and is dead then).
        """
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            with suppress(ConnectionError):  # the missing answer tells
                self._process.stdin.write(f"{concurrency} {slice_s}\n".encode())
                await self._process.stdin.drain()
        answer = await self.answer(slice_s + self._answer_s)
        return Batch(samples_s=answer.samples_s, wall_s=answer.wall_s)

    async def answer(self, timeout_s: float) -> _Answer:
        """The next line; cancelling it leaves the helper out of step."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError:
            kill_group(self._process)
            raise CannotMeasure(f"no answer within {timeout_s:.0f} s") from None
        if not line:
            raise CannotMeasure(f"its helper has ended{self._last_words()}")
        answer = msgspec.json.decode(line, type=_Answer)
        if answer.error:
            raise CannotMeasure(answer.error)
        return answer

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][-300:]}" if lines else ""


@asynccontextmanager
async def open_helper(
    name: str,
    module: str,
    *arguments: str,
    python: Path | str = sys.executable,
    flags: Sequence[str] = ("-E",),
    env: Mapping[str, str] | None = None,
    start_s: float = START_S,
    answer_s: float = ANSWER_S,
) -> AsyncIterator[HelperPeer]:
    """Runs `bench.peers.helpers.MODULE` by that interpreter, ready on entering and ended on leaving.

    Raises:
        CannotMeasure: it did not become ready.
    """
    with tempfile.TemporaryFile() as stderr:
        process = await asyncio.create_subprocess_exec(
            *(str(python), "-P", *flags, "-c", _BOOT, str(_ROOT), f"bench.peers.helpers.{module}", *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            limit=1 << 24,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        peer = HelperPeer(name, process, stderr, answer_s)
        try:
            await peer.answer(start_s)
            yield peer
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), _CLOSE_S)
            except TimeoutError:
                kill_group(process)
                await process.wait()


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kills a process that leads a session, and all of its group."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
