"""Starts from a large process: does a sandbox cost more when the engine's process is big, and does its loop stall?

Owns two engine processes that differ in their resident memory alone. Invariant: they take turns within each round, so
that both see the same machine.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from bench.machine import available_bytes
from bench.records import CannotMeasure, Measure, Skipped, claim
from bench.rounds import Batch, interleave, ratio
from bench.runner import Findings
from bench.sandbox.engine_process import READY, Answer
from sandbox.types import GIB, MIB

_NEEDED = 2
"""Times the ballast must be available: it must never push other programs out of memory."""
_STALL_MS = 5.0
_RATIO = 1.2
_KINDS = {"start": "ours: create to first result", "bare": "bare asyncio subprocess"}
_CLOSE_TIMEOUT_S = 30.0


class _Subject:
    """A peer: one kind of operation, one at a time, in one of the engine processes, under a lag probe."""

    def __init__(self, name: str, kind: str, engine: asyncio.subprocess.Process) -> None:
        self.name = name
        self._kind = kind
        self._engine = engine
        self.worst_stalls_s: list[float] = []
        """The largest of each batch, the first one included."""
        self.num_long = 0
        """Stalls of all batches that were longer than a claim allows."""

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """One batch, measured inside the engine process.

        Raises:
            CannotMeasure: a sandbox or the process failed.
        """
        assert self._engine.stdin is not None
        self._engine.stdin.write(f"{self._kind} {slice_s}\n".encode())
        answer = msgspec.json.decode(await _line(self._engine), type=Answer)
        if answer.error:
            raise CannotMeasure(f"{self.name}: {answer.error}")
        self.worst_stalls_s.append(max(answer.stalls_s))
        self.num_long += sum(1e3 * stall_s > _STALL_MS for stall_s in answer.stalls_s)
        return Batch(samples_s=answer.samples_s, wall_s=answer.wall_s, inner_s=answer.inner_s)

    def stall_measure(self, condition: str) -> Measure:
        """The row of the largest stall in each round."""
        worst_ms = [1e3 * stall_s for stall_s in self.worst_stalls_s[1:]]
        return Measure(
            name=f"loop stall: {self.name}",
            condition=condition,
            unit="ms",
            p50=statistics.median(worst_ms),
            p99=max(worst_ms),
            per_second=None,
            n=len(worst_ms),
        )


async def measure(state_dir: str | None, ballast_bytes: int, rounds: int, slice_s: float) -> Findings:
    """Compares starts in an engine with and without ballast.

    Skips, with the reason, where less than twice the ballast is available.
    """
    size = _spoken(ballast_bytes)
    ratio_name = f"create to first result with {size} resident / without, p50"
    stall_name = f"largest event-loop stall from a start with {size} resident"
    available = available_bytes()
    if available < _NEEDED * ballast_bytes:
        needed, there = _spoken(_NEEDED * ballast_bytes), _spoken(available)
        reason = f"needs {needed} of available memory, here are {there}"
        return Findings(
            skipped=[Skipped(name=f"{size} resident", reason=reason)],
            claims=[claim(ratio_name, None, "x", "<=", _RATIO), claim(stall_name, None, "ms", "<=", _STALL_MS)],
        )
    condition = f"with and without {size} resident in the engine's process"
    async with AsyncExitStack() as stack:
        small = await stack.enter_async_context(_engine(0, state_dir))
        large = await stack.enter_async_context(_engine(ballast_bytes, state_dir))
        subjects = [
            _Subject(f"{name}, {word}", kind, engine)
            for kind, name in _KINDS.items()
            for word, engine in (("without", small), ("with", large))
        ]
        subjects.append(_Subject("nothing, with", "nothing", large))
        series = await interleave(subjects, concurrency=1, rounds=rounds, slice_s=slice_s, condition=condition)
    lean, heavy = (series[subject.name].inner(subject.name) for subject in subjects[:2])
    timings = [lean, heavy, *(series[subject.name] for subject in subjects[2:4])]
    stalls = [subject.stall_measure(condition) for subject in subjects]
    return Findings(
        measures=[one.measure(rate=False) for one in timings] + stalls,
        claims=[
            claim(ratio_name, ratio(heavy, lean), "x", "<=", _RATIO),
            claim(stall_name, stalls[1].p99, "ms", "<=", _STALL_MS),
        ],
        notes=_notes(subjects),
    )


def _notes(subjects: Sequence[_Subject]) -> list[str]:
    long = ", ".join(f"{subject.num_long} ({subject.name})" for subject in subjects)
    return [
        "a stall is how late a 1 ms heartbeat on the loop came, less what the loop's thread waited for a CPU while "
        "other processes had it; its p50 is the median over rounds of the largest in a round, its p99 the largest of "
        f"all; each batch follows one operation that does not count; stalls over {_STALL_MS:g} ms: {long}"
    ]


@asynccontextmanager
async def _engine(ballast_bytes: int, state_dir: str | None) -> AsyncIterator[asyncio.subprocess.Process]:
    """An engine process that is ready, ended on leaving."""
    command = [
        sys.executable,
        "-m",
        "bench.sandbox.engine_process",
        str(ballast_bytes),
        *([state_dir] if state_dir else []),
    ]
    engine = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 24
    )
    try:
        if await _line(engine) != READY:
            raise CannotMeasure("an engine process started with nonsense")
        yield engine
    finally:
        assert engine.stdin is not None
        engine.stdin.close()
        try:
            await asyncio.wait_for(engine.wait(), _CLOSE_TIMEOUT_S)
        except TimeoutError:
            engine.kill()
            await engine.wait()


async def _line(engine: asyncio.subprocess.Process) -> bytes:
    assert engine.stdout is not None
    line = await engine.stdout.readline()
    if not line:
        raise CannotMeasure("an engine process has ended")
    return line


def _spoken(nbytes: int) -> str:
    return f"{nbytes / GIB:.3g} GiB" if nbytes >= GIB else f"{nbytes / MIB:.0f} MiB"
