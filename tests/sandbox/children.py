"""A process's children, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int) -> list[str]:
    """The numbers of those that it has not reaped, the dead among them."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
