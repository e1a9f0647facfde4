"""Which host uids an engine's sandboxes run as: one block of numbers per engine, claimed for the whole host.

Owns: byte locks in one file of this host (`/run/rollout/uids` for root), where the byte at offset N stands for uid N.
Invariant: two living engines never hold the same uid, whatever their state directories and settings; an engine lives
until its warden has ended too. The kernel drops a lock with its last holder, so a claim survives nobody and is never
cleaned up. Containers that share the host's uids but not its /run do not see each other's claims: give each its own
`uid_base`.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import pwd
import stat
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

from sandbox.errors import CapabilityError, ConfigError
from sandbox.estate.locks import HeldLock

_FLOCK = struct.Struct("hhqqi4x")
_ROUND = 65_536
_ID_FILES = ("/etc/subuid", "/etc/subgid")


class UidClaim(HeldLock):
    """A claimed block. The lock lasts until every copy of `lock_fd` is closed."""

    def __init__(self, block: int, uids: range, lock_fd: int) -> None:
        self.block = block
        """Its number, counted from the first uid that may be claimed."""
        self.uids = uids
        super().__init__(lock_fd)


def claims_dir() -> Path:
    """Where this user's claims are seen by all of its engines on this host.

    At home if it has one, for /run/user is removed at the last logout, under engines that live on; named after the
    host, since hosts may share a home and not their uids.
    """
    uid = os.geteuid()
    if uid == 0:
        return Path("/run/rollout")
    try:
        home = Path(pwd.getpwuid(uid).pw_dir)
    except KeyError:
        home = Path("/nonexistent")
    if home.is_dir() and os.access(home, os.W_OK):
        return home / ".local" / "state" / "rollout" / f"uids-{os.uname().nodename}"
    runtime = Path(f"/run/user/{uid}")
    if runtime.is_dir() and os.access(runtime, os.W_OK):
        return runtime / "rollout"
    return Path(f"/tmp/rollout-engine-{uid}")


MORE_UIDS = "raise sandbox.uid_count, or choose another sandbox.uid_base"
"""What root can do when every block is in use."""


def claim_uids(
    first: int, count: int, per_engine: int, preferred: int, remedy: str = MORE_UIDS, directory: Path | None = None
) -> UidClaim:
    """Claims `per_engine` of the `count` uids from `first` on: block `preferred`, or else the next free one (blocking).

    Args:
        remedy: how this user gets more uids.

    Raises:
        CapabilityError: every block is held by a living engine, or the file of claims cannot be used.
    """
    num_blocks = count // per_engine
    if num_blocks == 0:
        raise CapabilityError(f"{count} uids are too few for an engine, which takes {per_engine}", remedy)
    lock_fd = _open_claims(directory or claims_dir())
    try:
        for step in range(num_blocks):
            block = (preferred + step) % num_blocks
            start = first + block * per_engine
            if _try_lock(lock_fd, start, per_engine):
                return UidClaim(block, range(start, start + per_engine), lock_fd)
    except OSError as error:  # a file system without locks
        os.close(lock_fd)
        raise CapabilityError(f"host uids cannot be claimed ({error.strerror})", remedy) from None
    except BaseException:
        os.close(lock_fd)
        raise
    os.close(lock_fd)
    raise CapabilityError(f"living engines on this host use all uids from {first} to {first + count - 1}", remedy)


def _open_claims(directory: Path) -> int:
    """The file of claims, in a directory that nobody else can write to."""
    remedy = f"make {directory} a directory of this user's own, mode 0700 (in a read-only container: --tmpfs /run)"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise CapabilityError(f"{directory} is open to other users, so host uids cannot be claimed there", remedy)
        return os.open(directory / "uids", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CapabilityError(f"host uids cannot be claimed in {directory} ({error.strerror})", remedy) from None


def _try_lock(fd: int, start: int, length: int) -> bool:
    """Locks those bytes for the open file, not for the process: forks share it, as the warden does."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def require_unused(first: int, count: int) -> None:
    """Checks that nobody on this host has been given one of root's sandbox uids (blocking; reads the databases).

    Raises:
        ConfigError: names `sandbox.uid_base`, who has it, and a base that is free.
    """
    texts = {}
    for path in _ID_FILES:
        try:
            texts[path] = Path(path).read_text(errors="replace")
        except OSError:
            continue  # a host without subordinate ids
    users = [(f"user {user.pw_name}", user.pw_uid) for user in pwd.getpwall()]
    groups = [(f"group {group.gr_name}", group.gr_gid) for group in grp.getgrall()]
    check_unused(first, count, texts, [*users, *groups])


def check_unused(first: int, count: int, id_files: Mapping[str, str], accounts: Iterable[tuple[str, int]]) -> None:
    """The same, of the texts of subuid files by path, and of accounts with their numbers (pure)."""
    taken = [(who, number, number + 1) for who, number in accounts]
    for path, text in id_files.items():
        for line in text.splitlines():
            name, _, numbers = line.partition(":")
            begin, _, length = numbers.partition(":")
            if begin.isdigit() and length.isdigit():
                taken.append((f"{name} in {path}", int(begin), int(begin) + int(length)))
    clashes = [entry for entry in taken if entry[1] < first + count and first < entry[2]]
    if not clashes:
        return
    who, start, end = min(clashes, key=lambda entry: entry[1])
    highest = max(end for _, _, end in taken if end < 2**31 - count)
    free = -(-highest // _ROUND) * _ROUND
    raise ConfigError(
        "sandbox.uid_base",
        first,
        f"the {count} uids from there are not all free: {who} has {start}-{end - 1}; use another, for example {free}",
    )
