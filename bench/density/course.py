"""The course of one fleet: it grows, answers, and ends.

Owns what is noted on the way. Invariant: each part has a deadline, and a part that does not meet it ends the
measurement with the number that was reached.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import anyio.to_thread
import msgspec

from bench.density.fleet import Fleet, open_fleet
from bench.density.room import require_more_room, resident_bytes, settled_bytes
from bench.machine import available_bytes
from bench.records import CannotMeasure
from sandbox.health.census import Census, take_census
from sandbox.health.processes import snapshot, with_descendants
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import SandboxSpec

GROW_S = 900.0
"""Hard deadline for all of a fleet to be there."""
ASK_S = 300.0
"""And for each of them to have answered."""
_NUM_POINTS = 24
_WORKERS = 16
_SAY_EACH_S = 5.0
_SEED = 20


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """How things stood at one count."""

    count: int
    elapsed_s: float
    used_bytes: int
    """Host memory since before the first."""
    per_second: float
    """Creation rate since the point before; the last point, of what is left over, has that of the one before."""


class Course(msgspec.Struct, kw_only=True):
    """What one fleet did."""

    name: str
    count: int
    points: list[Point] = []
    creations_s: list[float] = []
    created_s: float = 0.0
    """Until all were there."""
    used_bytes: int = 0
    """Host memory of all, idle, after they came up."""
    engine_bytes: int = 0
    """Of these: growth of the engine's resident set."""
    used_later_bytes: int = 0
    """The same, after each has run a command."""
    num_processes: int = 0
    num_descriptors: int = 0
    """In the engine."""
    commands_s: list[float] = []
    wholes_s: list[float] = []
    """Of the same commands, with the lease before and the reset after; empty where they are leased all the time."""
    unenforced: tuple[str, ...] = ()
    closed_s: float = 0.0
    leftovers: tuple[str, ...] = ()
    """What a census found after the end that was not there before."""


async def run_course(name: str, count: int, spec: SandboxSpec, config: SandboxConfig, *, leased: bool) -> Course:
    """Lets a fleet of that size grow, answer and end, in a host of its own.

    Args:
        leased: see `Fleet`.

    Raises:
        CannotMeasure: something ran short, took too long or failed; the fleet has ended.
    """
    course = Course(name=name, count=count)
    async with SandboxHost.start(config) as host:  # what the first engine of all sets up is there for the census
        state_dir = host.state_dir
    before = await anyio.to_thread.run_sync(take_census, state_dir)
    async with SandboxHost.start(config) as host:
        async with host.acquire(spec):
            pass  # what the first sandbox sets up is not counted to the others
        async with open_fleet(host, spec, leased=leased) as fleet:
            unused_bytes = await settled_bytes()
            engine_bytes = resident_bytes()
            num_processes, num_descriptors = await _held()
            await _grow(fleet, course, unused_bytes)
            course.used_bytes = unused_bytes - await settled_bytes()
            course.engine_bytes = resident_bytes() - engine_bytes
            processes, descriptors = await _held()
            course.num_processes = processes - num_processes
            course.num_descriptors = descriptors - num_descriptors
            await _ask(fleet, course)
            course.used_later_bytes = unused_bytes - await settled_bytes()
            began = time.monotonic()
    course.closed_s = time.monotonic() - began
    after = await anyio.to_thread.run_sync(take_census, state_dir)
    course.leftovers = tuple(sorted(_found(after) - _found(before)))
    return course


async def _grow(fleet: Fleet, course: Course, unused_bytes: int) -> None:
    began = time.monotonic()
    num_begun = 0
    step = max(_WORKERS, course.count // _NUM_POINTS)  # fewer would show how the workers take turns
    said = _Sayings(course)
    last = Point(count=0, elapsed_s=0.0, used_bytes=0, per_second=0.0)

    async def work() -> None:
        nonlocal num_begun, last
        while num_begun < course.count:
            num_begun += 1
            start = time.monotonic()
            await fleet.add()
            now = time.monotonic()
            course.creations_s.append(now - start)
            count = len(course.creations_s)
            if count % step == 0 or count == course.count:
                rate = (count - last.count) / max(1e-6, now - began - last.elapsed_s)
                rate = rate if count % step == 0 or not course.points else last.per_second
                used = unused_bytes - available_bytes()
                last = Point(count=count, elapsed_s=now - began, used_bytes=used, per_second=rate)
                course.points.append(last)
                require_more_room(count)
            said.maybe(f"{count:,} are there, {last.per_second:.0f}/s, {last.used_bytes / 2**20:,.0f} MiB")

    with _deadline(GROW_S, lambda: f"{len(fleet):,} of {course.count:,} sandboxes were there"):
        async with anyio.create_task_group() as group:
            for _ in range(min(_WORKERS, course.count)):
                group.start_soon(work)
    course.created_s = time.monotonic() - began


async def _ask(fleet: Fleet, course: Course) -> None:
    """A command in each, one at a time, in an order that no cache knows."""
    order = list(range(len(fleet)))
    random.Random(_SEED).shuffle(order)
    said = _Sayings(course)
    with _deadline(ASK_S, lambda: f"{len(course.commands_s):,} of {course.count:,} sandboxes had answered"):
        for index in order:
            began = time.perf_counter()
            course.commands_s.append(await fleet.command(index))
            if not fleet.leased:
                course.wholes_s.append(time.perf_counter() - began)
            said.maybe(f"{len(course.commands_s):,} have answered")
    course.unenforced = tuple(sorted(fleet.unenforced))


async def _held() -> tuple[int, int]:
    """Processes that descend from this one, and its descriptors."""

    def look() -> tuple[int, int]:
        return len(with_descendants([os.getpid()], snapshot())), len(os.listdir("/proc/self/fd"))

    return await anyio.to_thread.run_sync(look)


def _found(census: Census) -> set[str]:
    kinds = ("dead_engines", "processes", "cgroups", "mounts", "directories", "shared_memory")
    return {f"{kind}: {one}" for kind in kinds for one in getattr(census, kind)}


@contextmanager
def _deadline(seconds: float, reached: Callable[[], str]) -> Iterator[None]:
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise CannotMeasure(f"{reached()} after {seconds:.0f} s, when there was no more time")


class _Sayings:
    """Progress for whoever waits, on stderr, every few seconds."""

    def __init__(self, course: Course) -> None:
        self._head = f"density: {course.name}, {course.count:,}:"
        self._next_s = time.monotonic() + _SAY_EACH_S

    def maybe(self, words: str) -> None:
        """Says it, if nothing has been said for a while."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _SAY_EACH_S
            print(f"{self._head} {words}", file=sys.stderr, flush=True)
