"""What a host that has run out of something is told its user as.

Owns: the list of what can run out, and the remedies. Invariant: pure; an errno that says nothing of this gives the
fault that the caller names.
"""

from __future__ import annotations

import errno
import os

from sandbox.errors import ExhaustedError, SandboxError

_DESCRIPTORS = (
    "descriptors",
    "raise the limit of open files (`ulimit -n`; fs.file-max for the whole machine), or have fewer sandboxes",
)
_MEMORY = "memory", "lower the limits or the number of sandboxes (`max_sandboxes`, `pool.max_leased`)"
_DISK = "disk space", "free space and inodes where the state directory lies, or set `state_dir` to another place"
_ROOM = (
    "namespaces, mounts or control groups",
    "raise user.max_*_namespaces and fs.mount-max (sysctl), or have fewer sandboxes; "
    "and look for free space and inodes where the state directory lies",
)
_PROCESSES = "processes", "raise kernel.pid_max or the process limit (`ulimit -u`), or have fewer sandboxes"

_ALWAYS = {
    errno.EMFILE: _DESCRIPTORS,
    errno.ENFILE: _DESCRIPTORS,
    errno.ETOOMANYREFS: _DESCRIPTORS,
    errno.ENOMEM: _MEMORY,
    errno.ENOBUFS: _MEMORY,
}
_WRITING = {**_ALWAYS, errno.ENOSPC: _DISK, errno.EDQUOT: _DISK}
"""Of calls that write files of the host."""
_BUILDING = {**_ALWAYS, errno.ENOSPC: _ROOM, errno.EDQUOT: _DISK, errno.EAGAIN: _PROCESSES, errno.EUSERS: _ROOM}
"""Of calls that make processes, namespaces, mounts and control groups."""


def fault(doing: str, number: int | None, otherwise: type[SandboxError] = SandboxError) -> SandboxError:
    """The fault for an errno of a call of ours about sockets, pipes, processes or control groups.

    Args:
        doing: what could not be done.
        otherwise: made with the words alone, where nothing has run out.
    """
    found = _BUILDING.get(number or 0)
    if found is None:
        return otherwise(f"{doing}: {os.strerror(number or errno.EIO)}")
    return ExhaustedError(f"{doing} ({os.strerror(number or 0)})", *found)


def fault_in(words: str, otherwise: type[SandboxError]) -> SandboxError:
    """The same for words of a jail tool, which hold the system's own for the errno."""
    for number, found in _BUILDING.items():
        if os.strerror(number) in words:
            return ExhaustedError(words, *found)
    return otherwise(words)


def fault_with(words: str, number: int, otherwise: type[SandboxError]) -> SandboxError:
    """The same for words of the warden and the errno that came with them, of a call of its own."""
    found = _ALWAYS.get(number)
    return otherwise(words) if found is None else ExhaustedError(words, *found)


def exhausted_writing(path: str, error: OSError) -> ExhaustedError | None:
    """The fault for a file of the host that could not be written, where the host has run out of something."""
    found = _WRITING.get(error.errno or 0)
    return None if found is None else ExhaustedError(f"{path} cannot be written ({error.strerror})", *found)
