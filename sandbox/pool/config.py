"""How a pool behaves: settings, their bounds and their defaults.

Owns: `PoolConfig`. Invariant: a setting outside its bounds is a `ConfigError` that names it, raised when the struct is
made.
"""

from __future__ import annotations

import math

import msgspec

from sandbox.checking import check_fields
from sandbox.errors import ConfigError
from sandbox.types import MAX_USER, MIB, JailName, check_jail


class Warm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jails to have ready before anybody asks."""

    count: int
    """Idle ones that are kept, however long nobody wants them."""
    image: str = "host"
    jail: JailName = "bubblewrap"
    user: int = 1000

    def __post_init__(self) -> None:
        check_jail("pool.warm.jail", self.jail)
        check_fields(self, "pool.warm")
        for field, low, high in (("count", 1, 1 << 20), ("user", 0, MAX_USER)):
            value = getattr(self, field)
            if not low <= value <= high:
                raise ConfigError(f"pool.warm.{field}", value, f"must lie between {low} and {high}")


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a pool behaves; checked when it is made."""

    max_leased: int | None = None
    """Sandboxes given out at once; a lease counts until its jail is clean again, or gone. None: 256, or as many as the
    host and the descriptors of this process allow."""
    max_jails: int | None = None
    """Jails of every kind at once: leased, idle, being built, being ended, and those that cannot be killed. None: a
    quarter more than `max_leased`, and what `warm` names, as far as the descriptors of this process reach."""
    max_building: int | None = None
    """Jails built at once; None: four per core. One that takes longer than `slow_build_s` gives its turn to another."""
    max_waiting: int = 65_536
    """Acquires that wait at once; the next one gets `PoolFullError`."""
    warm: tuple[Warm, ...] = ()
    """Jails that are built as soon as the pool starts, and kept."""
    idle_s: float = 60.0
    """An idle jail that is not in `warm` ends after this time without a tenant."""
    aging_s: float = 30.0
    """So much longer waiting counts as much as one level of priority more."""
    memory_bytes: int | None = None
    """Sum of the memory and disk limits of all leases; None: eight times the host's cap for all sandboxes together
    (code seldom uses its limit, and the cap holds whatever is promised)."""
    pids: int | None = None
    """Sum of the process limits of all leases; None: eight times the host's cap for all sandboxes together."""
    min_free_bytes: int = 256 * MIB
    """No further lease or jail while the machine has less memory available than this."""
    max_memory_pressure: float = 0.2
    """No further lease or jail while all tasks of the machine stood still for want of memory in a larger share of the
    last ten seconds (PSI `full`, 0 to 1). Without leases one is given out in any case."""
    max_io_pressure: float = 0.8
    """The same for want of input or output."""
    build_retries: int = 4
    """How often building is tried again, for one acquire, after a fault of the host; never a command."""
    first_pause_s: float = 0.05
    """Pause before the first of these; it doubles."""
    most_pause_s: float = 5.0
    slow_build_s: float = 2.0
    """From then on a jail that is being built counts as slow: another is started in its place."""
    end_timeout_s: float = 30.0
    """Longest wait for a jail to be cleaned or to end; one that does not end by then is quarantined."""

    def __post_init__(self) -> None:
        check_fields(self, "pool")
        for field, low, high in (
            ("max_leased", 1, 1 << 16),
            ("max_jails", 1, 1 << 16),
            ("max_building", 1, 4096),
            ("max_waiting", 1, 1 << 24),
            ("idle_s", 0.0, 1e9),
            ("aging_s", 0.001, 1e9),
            ("memory_bytes", MIB, 1 << 60),
            ("pids", 2, 1 << 40),
            ("min_free_bytes", 0, 1 << 50),
            ("max_memory_pressure", 0.0, 1.0),
            ("max_io_pressure", 0.0, 1.0),
            ("build_retries", 0, 1000),
            ("first_pause_s", 0.0, 3600.0),
            ("most_pause_s", 0.0, 3600.0),
            ("slow_build_s", 0.001, 3600.0),
            ("end_timeout_s", 0.001, 3600.0),
        ):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and low <= value <= high):
                raise ConfigError(f"pool.{field}", value, f"must lie between {low} and {high}")
        if self.max_jails is not None and self.max_jails < (self.max_leased or 1):
            raise ConfigError("pool.max_jails", self.max_jails, f"must be at least max_leased ({self.max_leased})")
        kinds = [(warm.image, warm.jail, warm.user) for warm in self.warm]
        if len(set(kinds)) < len(kinds):
            raise ConfigError("pool.warm", kinds, "must name each image, jail and user once")
        if self.max_jails is not None and self.num_warm > self.max_jails:
            raise ConfigError("pool.warm", self.num_warm, f"must not be more than max_jails ({self.max_jails})")

    @property
    def num_warm(self) -> int:
        """Jails that `warm` names, all together."""
        return sum(warm.count for warm in self.warm)
