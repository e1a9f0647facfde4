"""On which processors sandboxes run, and with how much weight beside the rest of the machine.

Owns: the plan, and its own directory in a cgroup v1 cpuset hierarchy. Invariant: what is asked for is enforced by the
kernel for everything in a sandbox, or `open` says why not; without cgroups the warden's affinity is inherited, which
code inside may widen again.
"""

from __future__ import annotations

import os
import re

from sandbox.cgroup import files
from sandbox.cgroup.hierarchies import Hierarchies
from sandbox.errors import ConfigError

DEFAULT_WEIGHT = 100
"""What the kernel gives every cgroup v2; version 1 calls the same 1024."""
_SHARES_PER_WEIGHT = 1024 / DEFAULT_WEIGHT
_LIST = re.compile(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*")


def parse_cpu_set(field: str, text: str, usable: frozenset[int]) -> tuple[int, ...]:
    """The processors of a list such as `0-3,8`, in order.

    Args:
        usable: those that there are for this process.

    Raises:
        ConfigError: no such list, or it names a processor that is not usable; names `field`.
    """
    if not _LIST.fullmatch(text):
        raise ConfigError(field, text, "must be a list of processors such as 0-3,8")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low:
            raise ConfigError(field, text, f"the range {part} runs backwards")
        if not usable.issuperset({low, high}):
            raise ConfigError(field, text, f"this process may use the processors {format_cpu_set(usable)}")
        found.update(range(low, high + 1))
    if not found <= usable:
        raise ConfigError(field, text, f"this process may use the processors {format_cpu_set(usable)}")
    return tuple(sorted(found))


def format_cpu_set(cpus: frozenset[int] | tuple[int, ...]) -> str:
    """The same as a list of ranges."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)


class Cores:
    """Keeps the sandboxes of one engine on their processors.

    Args:
        cpus: None: wherever the engine may run.
        weight: 1 to 10000, beside 100 of whatever else runs; None: as any other program.
        places: where the engine stands.
        engine: as the engine's own cgroups are named.
    """

    def __init__(
        self,
        cpus: tuple[int, ...] | None = None,
        weight: int | None = None,
        places: Hierarchies | None = None,
        engine: str = "",
    ) -> None:
        self._cpus = cpus
        self._weight = weight
        self._parent = places.cpuset if cpus is not None and places is not None else None
        self._own = None if self._parent is None else f"{self._parent}/rollout-{engine}"
        self.roots: tuple[str, ...] = () if self._own is None else (self._own,)
        """To be recorded before `open`, and removed at the engine's end."""
        self.join: tuple[str, ...] = ()
        """The `cgroup.procs` files that a jail's first process joins beside its others."""

    def open(self, roots: tuple[str, ...], warden: int | None = None) -> str:
        """Makes it hold below the engine's parent cgroups (blocking); returns why not, empty where it does.

        Args:
            warden: the process that starts the jails, which inherit its processors where no cgroup holds them.
        """
        gaps = []
        if self._cpus is not None and (why := self._pin(roots, format_cpu_set(self._cpus))):
            gaps.append(f"cpu_set: {why}, so that code can leave the processors that it starts on")
        if self._weight is not None and (why := self._weigh(roots, self._weight)):
            gaps.append(f"cpu_weight: {why}")
        if warden is not None and self._cpus is not None and not self.join:
            os.sched_setaffinity(warden, self._cpus)
        return "; ".join(gaps)

    def _pin(self, roots: tuple[str, ...], cpus: str) -> str:
        if self._own is not None:
            return self._pin_v1(self._own, cpus)
        for root in roots:
            if os.path.exists(f"{root}/cgroup.controllers"):
                return _pin_v2(root, cpus)
        return "no cgroup with processors of its own"

    def _pin_v1(self, own: str, cpus: str) -> str:
        try:
            os.mkdir(own)
            try:
                files.write(f"{own}/cpuset.mems", files.read(f"{self._parent}/cpuset.effective_mems").strip())
                files.write(f"{own}/cpuset.cpus", cpus)
            except OSError:
                os.rmdir(own)
                raise
        except OSError as error:
            self.roots = ()
            return f"{own}: {error.strerror}"
        self.join = (f"{own}/cgroup.procs",)
        return ""

    def _weigh(self, roots: tuple[str, ...], weight: int) -> str:
        for root in roots:
            for name, value in (("cpu.weight", weight), ("cpu.shares", round(weight * _SHARES_PER_WEIGHT))):
                path = f"{root}/{name}"
                if os.path.exists(path):
                    try:
                        files.write(path, str(max(2, value)))
                        return ""
                    except OSError as error:
                        return f"{path}: {error.strerror}"
        return "no cgroup with a weight"


def _pin_v2(root: str, cpus: str) -> str:
    parent = os.path.dirname(root)
    try:
        if "cpuset" not in files.read(f"{parent}/cgroup.controllers").split():
            return f"{parent} has no controller cpuset"
        if "cpuset" not in files.read(f"{parent}/cgroup.subtree_control").split():
            files.write(f"{parent}/cgroup.subtree_control", "+cpuset")
        files.write(f"{root}/cpuset.cpus", cpus)
    except OSError as error:
        return f"{error.filename or root}: {error.strerror}"
    return ""
