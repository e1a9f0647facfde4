"""The bubblewrap jail: from a plan of a root file system to an argument list.

Owns: which namespaces and nodes a jail has. Invariant: `argv` is a pure function; nothing in the jail is
writable after bubblewrap has built it (the warden mounts the writable directories later, from outside), and its
first process is the agent.
"""

from __future__ import annotations

from collections.abc import Iterable

from sandbox.images.types import Image, Mount
from sandbox.jails.plan import (
    AGENT_FD,
    AGENT_PATH,
    DEVICE_LINKS,
    DEVICES,
    FILTER_FD,
    HOSTNAME,
    STAGING_PATH,
    WRITABLE,
    JailPlan,
)
from sandbox.jails.views import sources
from sandbox.protocol.wire import Item, Tag, text

START_ITEMS: tuple[Item, ...] = (text(Tag.READ_ONLY, "/proc"),)
"""What the warden does for every jail of this tool, beside running it."""


def explain(words: str) -> str:
    """What bubblewrap said about a failure: one clear line as it is."""
    return words


def _mount(mount: Mount) -> tuple[str, ...]:
    if mount.kind == "symlink":
        return "--symlink", mount.source, mount.target
    return "--ro-bind", mount.source, mount.target


def _flatten(groups: Iterable[tuple[str, ...]]) -> Iterable[str]:
    return (word for group in groups for word in group)


def argv(plan: JailPlan, image: Image) -> tuple[str, ...]:
    """The command that builds a jail of that image and becomes its agent.

    It expects the agent's socket at descriptor `AGENT_FD` and the system-call filter at `FILTER_FD`.
    """
    namespaces = ("user", "pid", "net", "ipc", "uts", "cgroup")
    return (
        plan.tool,
        *(f"--unshare-{name}" for name in namespaces),
        *("--uid", str(plan.user), "--gid", str(plan.user), "--hostname", HOSTNAME),
        *("--as-pid-1", "--cap-drop", "ALL", "--seccomp", str(FILTER_FD), "--clearenv"),
        *_flatten(map(_mount, image.mounts)),
        *_flatten(("--ro-bind", source, path) for source, path in sources(image)),
        *("--proc", "/proc"),
        # Single nodes: --dev would make a second user namespace, in which later mounts are refused.
        *_flatten(("--dev-bind", path, path) for path in DEVICES),
        *_flatten(("--symlink", text, path) for text, path in DEVICE_LINKS),
        *_flatten(("--dir", path) for path in (*WRITABLE, STAGING_PATH)),
        *("--ro-bind", plan.agent, AGENT_PATH),
        *("--remount-ro", "/", "--chdir", "/", "--", AGENT_PATH, "agent", str(AGENT_FD)),
    )
