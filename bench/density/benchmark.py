"""`bench density`: how many sandboxes live at once, what each costs, and how they answer.

Owns the claims. Invariant: idle sandboxes and those on a lease with limits of their own are measured apart, each kind
in an engine of its own and the smaller fleet first, since control groups cost more on a machine that has seen more
mounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypedDict

import anyio.to_thread
import msgspec

from bench.density import picture
from bench.density.course import Course, run_course
from bench.density.room import all_descriptors, require_room
from bench.peers.programs import PROGRAM
from bench.records import CannotMeasure, Claim, Measure, Skipped, claim
from bench.rounds import percentile
from bench.runner import Findings
from sandbox.config import default_pids
from sandbox.host import SandboxConfig
from sandbox.types import KIB, MIB, Limits, SandboxSpec

IDLE = "idle"
LEASED = "leased, with limits"
_LIMITS = {"memory", "pids", "cpus"}
_SHARED = 64
"""Processes that all sandboxes may have together, beside their own."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    sandboxes: int = 1000
    leased: int | None = None
    """None: a tenth of `sandboxes`."""
    limits: Limits = Limits(memory_bytes=64 * MIB, disk_bytes=16 * MIB, pids=32, cpus=0.5)
    """Of each that is leased."""
    report: str | None = None
    """Folder for the picture; None: below `runs`, named by the time."""
    state_dir: str | None = None


async def run(
    quick: bool, sandboxes: int | None = None, leased: int | None = None, report: str | None = None
) -> Findings:
    """Measures that many; with `quick` 200 where no number is given.

    Raises:
        CannotMeasure: see `measure`; and there is nothing to measure.
    """
    count = (200 if quick else Plan().sandboxes) if sandboxes is None else sandboxes
    if count < 1:
        raise CannotMeasure("--sandboxes must be at least 1")
    return await measure(Plan(sandboxes=count, leased=leased, report=report))


async def measure(plan: Plan) -> Findings:
    """Measures by that plan.

    Raises:
        CannotMeasure: the machine is too small, or a sandbox failed; nothing is left of them.
    """
    num_leased = max(1, plan.sandboxes // 10) if plan.leased is None else plan.leased
    folder = await anyio.to_thread.run_sync(_report_folder, plan.report)
    largest = max(plan.sandboxes, num_leased)
    config = SandboxConfig(state_dir=plan.state_dir, max_sandboxes=largest + 1, pids=max(default_pids(), 2 * largest))
    findings = Findings()
    courses: list[Course] = []
    with all_descriptors():
        require_room(largest)
        if num_leased:
            leased = await run_course(LEASED, num_leased, SandboxSpec(limits=plan.limits), config, leased=True)
            findings.measures += _measures(leased)
            findings.claims += [_limits_claim(leased), *_claims(leased)]
            courses.append(leased)
        idle = await run_course(IDLE, plan.sandboxes, SandboxSpec(), config, leased=False)
    findings.measures += _measures(idle)
    each_kib = idle.used_bytes / idle.count / KIB
    findings.claims.append(claim(f"{idle.count:,} {idle.name}: host memory each", each_kib, "KiB", "<=", 600))
    findings.claims += _claims(idle)
    courses.insert(0, idle)
    descriptors = idle.num_descriptors / idle.count
    findings.notes += [
        "each kind in an engine of its own, the leased first; host memory: how much less was available (MemAvailable, "
        "median over a second) once all were there, engine included",
        f"an idle one holds {descriptors:.2g} descriptors of the engine, and "
        f"{idle.engine_bytes / idle.count / KIB:.3g} KiB of its memory, which are counted",
        f"a command is {PROGRAM}, in every sandbox once, one at a time, in a shuffled order",
    ]
    await anyio.to_thread.run_sync(_draw, courses, folder, findings)
    return findings


def _report_folder(chosen: str | None) -> Path:
    """Makes the folder; before anything is measured, so that nothing is measured in vain."""
    folder = Path(chosen or f"runs/density-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotMeasure(f"--report {folder}: {error.strerror}") from error
    return folder


def _draw(courses: list[Course], folder: Path, findings: Findings) -> None:
    drawn = picture.draw(courses, folder)
    if drawn is None:
        findings.skipped.append(Skipped(name="picture", reason="needs matplotlib: pip install '.[plots]'"))
    else:
        findings.notes.append(f"picture: {drawn}")


def _measures(course: Course) -> list[Measure]:
    row = partial(Measure, condition=f"{course.count:,} {course.name}")
    first_kib, later_kib = (used / course.count / KIB for used in (course.used_bytes, course.used_later_bytes))
    rate = course.count / course.created_s
    creations_ms = [1e3 * seconds for seconds in course.creations_s]
    commands_ms = [1e3 * seconds for seconds in course.commands_s]
    whole = partial(row, per_second=None, n=course.count)
    whole_commands = []
    if course.wholes_s:
        wholes_ms = [1e3 * seconds for seconds in course.wholes_s]
        whole_commands = [row(name="lease, command, reset", unit="ms", **_quantiles(wholes_ms), per_second=None)]
    return [
        whole(name="host memory each", unit="KiB", p50=first_kib, p99=first_kib),
        whole(name="host memory each, after a command", unit="KiB", p50=later_kib, p99=later_kib),
        row(name="create, several at a time", unit="ms", **_quantiles(creations_ms), per_second=rate),
        row(name="command, one at a time", unit="ms", **_quantiles(commands_ms), per_second=None),
        *whole_commands,
        whole(name="create all", unit="s", p50=course.created_s, p99=course.created_s),
        whole(name="close all", unit="s", p50=course.closed_s, p99=course.closed_s),
    ]


class _Quantiles(TypedDict):
    p50: float
    p99: float
    n: int


def _quantiles(samples: Sequence[float]) -> _Quantiles:
    return {"p50": percentile(samples, 0.5), "p99": percentile(samples, 0.99), "n": len(samples)}


def _limits_claim(course: Course) -> Claim:
    missing = _LIMITS & set(course.unenforced)
    name = f"{course.count:,} {course.name}: of memory, pids and cpus, limits that are not enforced"
    return claim(name, len(missing), "limits", "<=", 0)


def _claims(course: Course) -> list[Claim]:
    """What holds for either kind."""
    kind = f"{course.count:,} {course.name}"
    quantiles = _quantiles([1e3 * seconds for seconds in course.commands_s])
    return [
        claim(f"{kind}: all created", course.created_s, "s", "<=", 300),
        claim(f"{kind}: processes, less one each", course.num_processes - course.count, "processes", "<=", _SHARED),
        claim(f"{kind}: command, p50", quantiles["p50"], "ms", "<=", 1.5),
        claim(f"{kind}: command, p99", quantiles["p99"], "ms", "<=", 10),
        claim(f"{kind}: all closed", course.closed_s, "s", "<=", 30),
        claim(f"{kind}: left behind, by census", len(course.leftovers), "things", "<=", 0),
    ]
