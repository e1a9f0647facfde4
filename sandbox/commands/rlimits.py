"""Resource limits of a command, as items of its request. Pure."""

from __future__ import annotations

import resource
from collections.abc import Sequence

from sandbox.protocol.wire import Item, rlimit
from sandbox.types import Limits

_HELPERS = 2
"""Processes of ours inside that RLIMIT_NPROC counts as well: the agent and the command's keeper."""


def limit_items(limits: Limits, unenforced: Sequence[str]) -> list[Item]:
    """Resource limits of every command; they do their best for what no cgroup enforces."""
    items = [
        rlimit(resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        rlimit(resource.RLIMIT_FSIZE, limits.file_size_bytes, limits.file_size_bytes),
        # 1 and not 0: a piped core handler of the host would still be started at 0.
        rlimit(resource.RLIMIT_CORE, 1, 1),
    ]
    if "pids" in unenforced:
        items.append(rlimit(resource.RLIMIT_NPROC, limits.pids + _HELPERS, limits.pids + _HELPERS))
    if "memory" in unenforced:
        items.append(rlimit(resource.RLIMIT_DATA, limits.memory_bytes, limits.memory_bytes))
    return items


def cpu_items(cpu_s: float | None) -> list[Item]:
    """The limit on CPU seconds, rounded up to whole ones."""
    if cpu_s is None:
        return []
    soft = max(1, int(-(-cpu_s // 1)))  # the kernel counts whole seconds
    return [rlimit(resource.RLIMIT_CPU, soft, soft + 1)]
