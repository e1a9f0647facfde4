"""Where this process stands in the host's cgroup trees. Pure functions of the kernel's own texts."""

from __future__ import annotations

from pathlib import Path

import msgspec

V1 = ("memory", "pids", "cpu")
CPUSET = "cpuset"


class Hierarchies(msgspec.Struct, frozen=True):
    """Where this process stands: its own directory in each v1 hierarchy, and in the v2 tree."""

    v1: dict[str, str]
    v2: str | None
    v2_mount: str | None
    cpuset: str | None = None
    """Its directory in the v1 hierarchy of that name, which limits nothing."""


def own_hierarchies() -> Hierarchies:
    """Those of the calling process."""
    proc = Path("/proc/self")
    return find_hierarchies((proc / "mountinfo").read_text(), (proc / "cgroup").read_text())


def find_hierarchies(mountinfo: str, cgroup: str) -> Hierarchies:
    """Reads the texts of /proc/self/mountinfo and /proc/self/cgroup.

    A place that is not below what is mounted (outside a cgroup namespace, for example) is None.
    """
    mounts: dict[str, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2":
            mounts.setdefault("v2", (root, point))
        elif kind == "cgroup":
            for name in options.split(","):
                if name in (*V1, CPUSET):
                    mounts.setdefault(name, (root, point))
    own: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(",") if names else ["v2"]:
            own[name] = path

    def directory(name: str) -> str | None:
        if name not in mounts or name not in own:
            return None
        root, point = mounts[name]
        path = own[name]
        if root != "/" and path.startswith(root):
            path = path[len(root) :]
        if ".." in path.split("/"):
            return None
        return point.rstrip("/") + (path if path != "/" else "")

    v1 = {name: found for name in V1 if (found := directory(name)) is not None}
    return Hierarchies(v1, directory("v2"), mounts["v2"][1] if "v2" in mounts else None, directory(CPUSET))
