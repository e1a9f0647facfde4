"""What a host that has run out of something is told its user as.

Owns: the list of what can run out, and the remedies. Invariant: pure; an error that says nothing of this stays what it
is.
"""

from __future__ import annotations

import errno
import os

from sandbox.errors import ExhaustedError

_DESCRIPTORS = "raise the limit of open files (`ulimit -n`; fs.file-max for the whole machine), or have fewer sandboxes"
_DISK = "free space or inodes where the state directory lies, or set `state_dir` to a place that has some"
_MEMORY = "lower the limits or the number of sandboxes (`max_sandboxes`, `pool.max_leased`)"
_PROCESSES = "raise kernel.pid_max or the user's process limit (`ulimit -u`), or have fewer sandboxes"

_REMEDIES: dict[int, tuple[str, str]] = {
    errno.EMFILE: ("descriptors", _DESCRIPTORS),
    errno.ENFILE: ("descriptors", _DESCRIPTORS),
    errno.ENOSPC: ("disk", _DISK),
    errno.EDQUOT: ("disk", _DISK),
    errno.ENOMEM: ("memory", _MEMORY),
    errno.EAGAIN: ("processes", _PROCESSES),
}
"""By errno. EAGAIN is what fork says; whoever asks about another call does not ask with it."""


def exhausted(doing: str, number: int) -> ExhaustedError | None:
    """The typed fault for that errno; None where it says something else."""
    if number not in _REMEDIES:
        return None
    return ExhaustedError(doing, *_REMEDIES[number])


def exhausted_in(words: str) -> ExhaustedError | None:
    """The same for the words of a jail tool or the warden, which end with the system's own for the errno."""
    for number in _REMEDIES:
        if os.strerror(number) in words:
            return exhausted(words, number)
    return None
