"""A picture of the process table, and killing by identity instead of by number.

Owns: nothing. Invariant: a process that ends while it is looked at is simply not in the picture, and `kill` never hits
a process that took over a number.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator, Mapping

import msgspec


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process as /proc shows it to anybody."""

    pid: int
    parent: int
    started: int
    """Clock ticks after boot; with the number, an identity."""
    name: str
    words: tuple[str, ...]
    """Its command line; empty for a kernel thread or a zombie."""


def snapshot() -> dict[int, ProcessInfo]:
    """Every process, by number; zombies are left out, since nothing of them is left but a number."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (info := inspect(int(entry))) is not None:
            found[info.pid] = info
    return found


def inspect(pid: int) -> ProcessInfo | None:
    """One process, or None when it does not live (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may hold any character, parentheses too.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    if fields[0] in ("Z", "X"):
        return None
    return ProcessInfo(pid, int(fields[1]), int(fields[19]), head.partition("(")[2], tuple(words))


def lives(info: ProcessInfo) -> bool:
    """Is it still there, and not another process that was given its number?"""
    now = inspect(info.pid)
    return now is not None and now.started == info.started


def real_uid(pid: int) -> int | None:
    """Whose process it is, also of one that hides its memory (whose files in /proc belong to root); None when gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Uid:")), None)
    except (FileNotFoundError, ProcessLookupError):
        return None


def ancestors(pid: int, table: Mapping[int, ProcessInfo]) -> Iterator[ProcessInfo]:
    """The parent of `pid`, its parent and so on, as far as `table` knows them."""
    seen = {pid}
    info = table.get(pid)
    while info is not None and info.parent not in seen:
        seen.add(info.parent)
        info = table.get(info.parent)
        if info is not None:
            yield info


def with_descendants(roots: Iterable[int], table: Mapping[int, ProcessInfo]) -> list[ProcessInfo]:
    """The processes in `roots` and everything that descends from them, parents first."""
    children: dict[int, list[int]] = {}
    for info in table.values():
        children.setdefault(info.parent, []).append(info.pid)
    found: dict[int, ProcessInfo] = {}
    todo = list(roots)
    while todo:
        pid = todo.pop(0)
        if pid in table and pid not in found:
            found[pid] = table[pid]
            todo += children.get(pid, [])
    return list(found.values())


def kill(info: ProcessInfo) -> bool:
    """Kill exactly this process; False when it has ended already. Raises PermissionError for another user's."""
    try:
        descriptor = os.pidfd_open(info.pid)
    except ProcessLookupError:
        return False
    try:
        if not lives(info):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
