"""What many sandboxes take from the machine: memory, descriptors, process numbers; and whether there is enough.

Invariant: nothing is started that cannot fit, and growth stops before the machine is out of something.
"""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

from bench.machine import available_bytes
from bench.records import CannotMeasure
from sandbox.types import GIB, KIB

FLOOR_BYTES = 1 * GIB
"""Available memory that is never touched."""
EXPECTED_BYTES = 1024 * KIB
"""Of one sandbox with what serves it, generously."""
_SPARE_DESCRIPTORS = 512
_SPARE_PROCESSES = 2048
_READINGS = 9
_BETWEEN_READINGS_S = 0.15


@contextmanager
def all_descriptors() -> Iterator[None]:
    """This process may open as many files as its hard limit allows, for as long as the context lasts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def require_room(count: int) -> None:
    """Refuses a number of sandboxes that cannot fit.

    Raises:
        CannotMeasure: names what there is too little of.
    """
    needed, there = count * EXPECTED_BYTES + FLOOR_BYTES, available_bytes()
    if there < needed:
        raise CannotMeasure(
            f"{count:,} sandboxes need {needed / GIB:.1f} GiB available, here are {there / GIB:.1f} GiB"
        )
    if (free := free_descriptors()) < count:
        raise CannotMeasure(f"{count:,} sandboxes need a descriptor each, {free:,} are free (see ulimit -Hn)")
    if (free := free_processes()) < count:
        raise CannotMeasure(f"{count:,} sandboxes need a process each, {free:,} are free (see kernel.pid_max)")


def require_more_room(count: int) -> None:
    """Looks again, while sandboxes are made.

    Raises:
        CannotMeasure: the machine is short of something, with the number that were made.
    """
    if available_bytes() < FLOOR_BYTES:
        raise CannotMeasure(
            f"memory is short after {count:,} sandboxes: less than {FLOOR_BYTES / GIB:.0f} GiB available"
        )
    if free_descriptors() <= 0:
        raise CannotMeasure(f"descriptors are short after {count:,} sandboxes (see ulimit -Hn)")
    if free_processes() <= 0:
        raise CannotMeasure(f"process numbers are short after {count:,} sandboxes (see kernel.pid_max)")


def free_descriptors() -> int:
    """That this process may still open, less a reserve."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) - _SPARE_DESCRIPTORS


def free_processes() -> int:
    """Process numbers that nobody uses, less a reserve for the rest of the machine."""
    in_use = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    return int(Path("/proc/sys/kernel/pid_max").read_text()) - in_use - _SPARE_PROCESSES


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def settled_bytes() -> int:
    """Available memory: the median of readings over a good second, for others use memory too."""
    readings = []
    for _ in range(_READINGS):
        readings.append(available_bytes())
        await anyio.sleep(_BETWEEN_READINGS_S)
    return int(statistics.median(readings))
