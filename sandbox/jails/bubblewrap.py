"""The bubblewrap jail: from a plan of a root file system to an argument list.

Owns: which namespaces, nodes and masks a jail has. Invariant: `argv` is a pure function; nothing in the jail is
writable after bubblewrap has built it (the warden mounts the writable directories later, from outside), and its
first process is the agent.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from sandbox.images.types import Image, Mount

HOSTNAME = "sandbox"
INNER_UID = 1000
AGENT_PATH = "/.rollout/agent"
WRITABLE = ("/workspace", "/tmp", "/dev/shm")
AGENT_FD = 3
SECCOMP_FD = 4
_DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = (
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
)
MASKABLE = ("kallsyms", "keys", "key-users", "cmdline", "timer_list", "kpagecount", "kpageflags", "config.gz")
"""Files of /proc that tell about the host; masked where they exist."""


class JailPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between two hosts' jails of the same image."""

    bwrap: str
    """Path of the binary; any uid can execute it."""
    agent: str
    """Path of the native helper; any uid can read it."""
    masked: tuple[str, ...] = ()
    """Files below /proc to cover; each exists on this host."""


def _mount(mount: Mount) -> tuple[str, ...]:
    if mount.kind == "symlink":
        return "--symlink", mount.source, mount.target
    return "--ro-bind", mount.source, mount.target


def _flatten(groups: Iterable[tuple[str, ...]]) -> Iterable[str]:
    return (word for group in groups for word in group)


def argv(plan: JailPlan, image: Image) -> tuple[str, ...]:
    """The command that builds a jail of that image and becomes its agent.

    It expects the agent's socket at descriptor `AGENT_FD` and the system-call filter at `SECCOMP_FD`.
    """
    namespaces = ("user", "pid", "net", "ipc", "uts", "cgroup")
    return (
        plan.bwrap,
        *(f"--unshare-{name}" for name in namespaces),
        *("--uid", str(INNER_UID), "--gid", str(INNER_UID), "--hostname", HOSTNAME),
        *("--as-pid-1", "--cap-drop", "ALL", "--seccomp", str(SECCOMP_FD), "--clearenv"),
        *_flatten(map(_mount, image.mounts)),
        *("--proc", "/proc"),
        *_flatten(("--ro-bind", "/dev/null", f"/proc/{name}") for name in plan.masked),
        # Single nodes: --dev would make a second user namespace, in which later mounts are refused.
        *_flatten(("--dev-bind", f"/dev/{name}", f"/dev/{name}") for name in _DEVICES),
        *_flatten(("--symlink", text, path) for text, path in _DEVICE_LINKS),
        *_flatten(("--dir", path) for path in WRITABLE),
        *("--ro-bind", plan.agent, AGENT_PATH),
        *("--remount-ro", "/", "--chdir", "/", "--", AGENT_PATH, "agent", str(AGENT_FD)),
    )
