"""Whether memory limits hold where a host swaps: a kernel that does not count swap lets a process go over them."""

from __future__ import annotations

from pathlib import Path

WHY_UNCOUNTED = (
    "this host has swap, and its kernel does not count it for control groups (boot with swapaccount=1, or swapoff -a)"
)


def in_use(table: Path = Path("/proc/swaps")) -> bool:
    """Does the host have a swap device or file that is on?"""
    try:
        return len(table.read_text().splitlines()) > 1  # the first line is the heading
    except FileNotFoundError:
        return False  # a kernel without swap
