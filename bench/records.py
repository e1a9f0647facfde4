"""What a benchmark reports: plain data, written as JSON and printed as a table.

Owns the report's format. Invariant: every figure in it was measured in one run on the machine that it names, and a
claim that could not be measured says neither yes nor no.
"""

from __future__ import annotations

from typing import Literal

import msgspec

_RELATIONS = {"<=": "≤", "<": "<", ">=": "≥"}


class CannotMeasure(Exception):
    """The benchmark cannot run on this host, or its subject misbehaved; the text is one line for a person."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures come from."""

    cpu_model: str
    num_cores: int
    """CPUs that this process may use."""
    memory_bytes: int
    kernel: str
    load_1m: float
    """Load average over the minute before the benchmark began: what else was running."""


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a subject under one condition."""

    name: str
    condition: str = ""
    """What was varied: `concurrency 16`, say."""
    unit: str
    """Unit of `p50` and `p99`."""
    p50: float
    """Median over rounds of each round's median."""
    p99: float
    """99th percentile of all samples of all rounds; where the samples are rounds, the worst."""
    per_second: float | None
    """Operations per second, median over rounds; None where a rate means nothing."""
    n: int
    """Number of samples."""


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A row that this host could not give, and why."""

    name: str
    reason: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One promised figure, held against what was measured."""

    name: str
    value: float | None
    """None where it could not be measured."""
    unit: str
    target: str
    """A relation and a number in `unit`: `<= 1.2`."""
    holds: bool | None
    """None where it could not be measured."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one benchmark."""

    benchmark: str
    quick: bool
    started_at: str
    """UTC, ISO 8601."""
    wall_s: float
    machine: Machine
    versions: dict[str, str]
    measures: list[Measure]
    skipped: list[Skipped]
    claims: list[Claim]
    notes: list[str]
    """What a reader must know to judge the rows."""


def claim(name: str, value: float | None, unit: str, relation: Literal["<=", "<", ">="], bound: float) -> Claim:
    """Holds `value` (as it is, unrounded) against `bound`."""
    holds: bool | None = None
    if value is not None:
        holds = {"<=": value <= bound, "<": value < bound, ">=": value >= bound}[relation]
    return Claim(name=name, value=value, unit=unit, target=f"{relation} {bound:g}", holds=holds)


def spoken(target: str) -> str:
    """A claim's target for people: `≤ 1.2`."""
    relation, _, number = target.partition(" ")
    return f"{_RELATIONS[relation]} {number}"
