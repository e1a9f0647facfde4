"""No cgroups: every limit that needs one is reported as not enforced, and resource limits do their best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sandbox.cgroup.types import CgroupPlan, Live, Reading
from sandbox.types import Limits


class AbsentSet:
    """Nothing to make, join or read; see `sandbox.cgroup.types.CgroupSet` for the methods."""

    def start_plan(self) -> CgroupPlan:
        return CgroupPlan()

    def kill_file(self) -> str | None:
        return None

    def freezer(self) -> str | None:
        return None

    def is_empty(self) -> bool:
        return True

    def is_full(self) -> bool:
        return False

    def remove_paths(self) -> tuple[str, ...]:
        return ()

    def residue_bytes(self) -> int:
        return 0

    def empty(self) -> None:
        """Nothing to give back."""

    def take_leaf(self) -> str | None:
        return None

    def return_leaf(self, leaf: str) -> None:
        raise AssertionError("there are no leaves without cgroups")

    def idle(self) -> bool:
        return True

    def join_files(self, leaf: str) -> tuple[str, ...]:
        raise AssertionError("there are no leaves without cgroups")

    def kill_leaf(self, leaf: str) -> None:
        raise AssertionError("there are no leaves without cgroups")

    def reset_peak(self) -> None:
        """Nothing to reset."""

    @property
    def peak_is_the_leafs(self) -> bool:
        return False

    def peak_bytes(self, leaf: str | None) -> int | None:
        return None

    def read(self, leaf: str | None) -> Reading:
        return Reading()

    def begin(self) -> None:
        """Nothing was counted."""

    def live(self) -> Live:
        return Live()


class AbsentBackend:
    """The fall-back for a user without cgroups; isolation is the same, quotas are not."""

    name: Literal["none"] = "none"

    def __init__(self) -> None:
        self.roots: tuple[str, ...] = ()
        self.agents: tuple[str, ...] = ()
        self.enforced: Mapping[str, bool] = {"memory": False, "cpus": False, "pids": False, "disk": True}
        self.note = ""

    def open(self, memory_bytes: int, pids: int, agents_bytes: int) -> None:
        """Nothing to make."""

    def new_set(self, index: int, limits: Limits) -> AbsentSet:
        return AbsentSet()
