"""Runs one benchmark by its name and wraps its findings into a report.

Owns the list of benchmarks. Invariant: a benchmark either yields a whole report or raises; what kept it from
measuring leaves as `CannotMeasure` with one line for a person, and a bug of ours as itself.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import msgspec

from bench.machine import this_machine, versions
from bench.records import CannotMeasure, Claim, Measure, Report, Skipped
from rollout import errors as rollout_errors
from sandbox import errors as sandbox_errors
from sandbox.loop import run_on_loop

BENCHMARKS = {
    "sandbox": "what isolation costs: creating sandboxes, running commands in them, beside other ways",
    "pool": "commands in recycled sandboxes from a warm pool, beside one-shot sandboxes and containers",
    "density": "many sandboxes alive at once: memory, creation rate, commands, closing",
    "lane": "trajectories from the engine to the learner through shared memory, beside pickling and a plain copy",
    "verify": "verdicts per second, beside an unsandboxed interpreter per verdict",
}
"""Each is a module `bench.NAME.benchmark` with `async def run(quick) -> Findings`."""

_NOT_MEASURED = (
    CannotMeasure,
    sandbox_errors.SandboxError,
    rollout_errors.ConfigError,
    rollout_errors.Fault,
    OSError,
)


class Findings(msgspec.Struct, kw_only=True):
    """What a benchmark found out; the report without its frame."""

    measures: list[Measure] = []
    skipped: list[Skipped] = []
    claims: list[Claim] = []
    notes: list[str] = []


class Benchmark(Protocol):
    """A module of this package that measures something."""

    async def run(self, quick: bool, **options: Any) -> Findings:
        """Measures; with `quick` in less than a minute. Most take no options."""
        ...


def run_benchmark(name: str, *, quick: bool, options: Mapping[str, Any] | None = None) -> Report:
    """Runs one of `BENCHMARKS` on an event loop as the engine's.

    Args:
        options: of that benchmark alone, by the names of its `run`.

    Raises:
        CannotMeasure: unknown name or option, or this host cannot run it.
    """
    if name not in BENCHMARKS:
        known = "; ".join(f"{known} ({what})" for known, what in BENCHMARKS.items())
        raise CannotMeasure(f"no benchmark is called {name!r}; there are: {known}")
    module: Benchmark = importlib.import_module(f"bench.{name}.benchmark")
    options = options or {}
    if strange := [option for option in options if option not in inspect.signature(module.run).parameters]:
        raise CannotMeasure(f"--{strange[0]} is not an option of bench {name}")
    machine, started_at, began = this_machine(), datetime.now(UTC), time.monotonic()
    try:
        findings = run_on_loop(partial(module.run, **options), quick)
    except BaseException as error:
        cause = _first(error)
        if isinstance(cause, _NOT_MEASURED):
            raise CannotMeasure(_one_line(cause)) from error
        raise
    return Report(
        benchmark=name,
        quick=quick,
        started_at=started_at.isoformat(timespec="seconds"),
        wall_s=time.monotonic() - began,
        machine=machine,
        versions=versions(),
        measures=findings.measures,
        skipped=findings.skipped,
        claims=findings.claims,
        notes=findings.notes,
    )


def _first(error: BaseException) -> BaseException:
    """The first exception in a group of them: workers that fail together fail for the same reason."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


def _one_line(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words if isinstance(error, CannotMeasure) else f"{type(error).__name__}: {words}"
