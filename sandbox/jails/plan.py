"""What every jail has in common, whichever tool builds it.

Owns: the names, numbers and paths inside that the agent, the warden and the sandboxed code rely on.
Invariant: a jail tool changes none of them, so code in a sandbox cannot tell which one built it by where things are.
"""

from __future__ import annotations

import msgspec

HOSTNAME = "sandbox"
AGENT_PATH = "/.rollout/agent"
STAGING_PATH = "/.rollout/staging"
"""An empty directory, where the warden mounts the sandbox's tmpfs until its parts are at their places."""
WRITABLE = ("/workspace", "/tmp", "/dev/shm")
AGENT_FD = 3
FILTER_FD = 4
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
DEVICE_MINORS = {"/dev/null": 3, "/dev/zero": 5, "/dev/full": 7, "/dev/random": 8, "/dev/urandom": 9}
"""Their numbers beside major number 1: root gives each sandbox nodes of its own, other users share the host's."""
DEVICE_LINKS = (
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
)
VISIBLE = frozenset(
    (
        *("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version", "vmstat"),  # what programs read
        *("mounts", "net", "self", "sys", "sysvipc", "thread-self"),  # each namespace's own
    )
)
"""Entries of /proc that stay, beside the processes; every other tells about the host (or, like `locks`, about
siblings), and is empty inside."""


class JailPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between two jails of the same image."""

    tool: str
    """Path of the jail tool's binary; any uid can execute it."""
    agent: str
    """Path of the native helper; any uid can read it."""
    masked: tuple[str, ...] = ()
    """Names in /proc to cover; each exists on this host and any uid can read it."""
    nice: int = 0
    """The priority that the jail starts with, and keeps."""
    user: int = 1000
    """Uid and gid that the sandboxed code sees as its own."""
