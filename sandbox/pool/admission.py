"""May one more be served now?

Owns: what has been promised to leases. Invariant: the promises never exceed the budget; what is taken is given back
exactly once. The machine's own state (free memory, pressure) holds back everything but the first lease, so that
somebody always makes progress.
"""

from __future__ import annotations

import resource
from collections.abc import Callable

import msgspec

from sandbox.errors import ConfigError
from sandbox.pool.config import PoolConfig
from sandbox.pool.pressure import Pressure
from sandbox.types import SandboxSpec

FDS_PER_JAIL = 2
"""The engine's end of the agent's socket, and one that is on its way."""
FDS_PER_LEASE = 6
"""For one running command, or one transfer: pipes, and files of control groups that are read."""
FDS_SPARE = 64
"""For the embedding program, beside what it has open when the pool starts."""
_LEASES = 256
_OVERCOMMIT = 8


class Need(msgspec.Struct, frozen=True):
    """What one lease may use."""

    memory_bytes: int
    pids: int

    @classmethod
    def of(cls, spec: SandboxSpec) -> Need:
        """That of a sandbox made to this spec."""
        return cls(spec.limits.memory_bytes + spec.limits.disk_bytes, spec.limits.pids)


class Budget(msgspec.Struct, frozen=True):
    """What all leases together may have been promised, and how many jails there may be."""

    leases: int
    jails: int
    memory_bytes: int
    pids: int

    @classmethod
    def of(cls, config: PoolConfig, memory_bytes: int, pids: int, free_fds: int, max_jails: int) -> Budget:
        """That of a pool.

        Args:
            memory_bytes, pids: the host's caps for all sandboxes together.
            free_fds: descriptors that this process may still open.
            max_jails: sandboxes that the host keeps at once.

        Raises:
            ConfigError: the host, or the limit of open files, is too small for what was asked for.
        """
        most = (free_fds - FDS_SPARE) // (FDS_PER_LEASE + FDS_PER_JAIL)
        leases = config.max_leased or min(_LEASES, max(most, 1), config.max_jails or max_jails, max_jails)
        if leases > most:
            needed = leases * (FDS_PER_LEASE + FDS_PER_JAIL) + FDS_SPARE
            raise ConfigError(
                "pool.max_leased",
                config.max_leased,
                f"needs {needed} more open files and this process may have {free_fds} more: "
                "raise its limit (`ulimit -n`) or lower max_leased",
            )
        by_fds = (free_fds - FDS_SPARE - leases * FDS_PER_LEASE) // FDS_PER_JAIL
        wanted = config.max_jails or max(leases + leases // 4 + 1, config.num_warm)
        if config.max_jails is not None and config.max_jails > by_fds:
            raise ConfigError(
                "pool.max_jails",
                config.max_jails,
                f"the open files of this process reach for {by_fds}: raise the limit (`ulimit -n`) or lower max_jails",
            )
        if max(config.max_jails or 0, leases) > max_jails:
            raise ConfigError(
                "pool.max_jails" if config.max_jails else "pool.max_leased",
                config.max_jails or config.max_leased,
                f"the host keeps {max_jails} sandboxes at once: raise sandbox.max_sandboxes",
            )
        return cls(
            leases=leases,
            jails=min(wanted, by_fds, max_jails),
            memory_bytes=config.memory_bytes or _OVERCOMMIT * memory_bytes,
            pids=config.pids or _OVERCOMMIT * pids,
        )


def free_descriptors(num_open: int) -> int:
    """How many more files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (1 << 30 if soft == resource.RLIM_INFINITY else soft) - num_open


class Admission:
    """Counts promises against a budget.

    Args:
        look: how the machine stands.
    """

    def __init__(self, budget: Budget, config: PoolConfig, look: Callable[[], Pressure]) -> None:
        self.budget = budget
        self._config = config
        self._look = look
        self.num_leases = 0
        self.memory_bytes = 0
        self.pids = 0

    def check(self, need: Need) -> None:
        """Refuses what no waiting would make possible.

        Raises:
            ConfigError: it is more than the whole budget.
        """
        for field, asked, most, setting in (
            ("memory_bytes", need.memory_bytes, self.budget.memory_bytes, "memory_bytes"),
            ("pids", need.pids, self.budget.pids, "pids"),
        ):
            if asked > most:
                words = "with disk_bytes, " if field == "memory_bytes" else ""
                remedy = f"{words}the pool gives out {most} in all: lower it or raise pool.{setting}"
                raise ConfigError(f"spec.limits.{field}", asked, remedy)

    def held_back_by(self, need: Need) -> str:
        """What speaks against one more lease now; empty for nothing."""
        if self.num_leases >= self.budget.leases:
            return "leases"
        if self.memory_bytes + need.memory_bytes > self.budget.memory_bytes:
            return "memory"
        if self.pids + need.pids > self.budget.pids:
            return "pids"
        return self.strained() if self.num_leases else ""

    def strained(self) -> str:
        """What the machine itself has too little of now; empty for nothing."""
        now, config = self._look(), self._config
        if now.free_bytes is not None and now.free_bytes < config.min_free_bytes:
            return "free memory"
        if now.memory is not None and now.memory > config.max_memory_pressure:
            return "pressure"
        if now.io is not None and now.io > config.max_io_pressure:
            return "pressure"
        return ""

    def take(self, need: Need) -> None:
        """Promises it."""
        self.num_leases += 1
        self.memory_bytes += need.memory_bytes
        self.pids += need.pids

    def give_back(self, need: Need) -> None:
        """The promise is over."""
        self.num_leases -= 1
        self.memory_bytes -= need.memory_bytes
        self.pids -= need.pids
        assert min(self.num_leases, self.memory_bytes, self.pids) >= 0
