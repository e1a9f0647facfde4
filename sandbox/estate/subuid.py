"""Host uids of their own for the sandboxes of an unprivileged engine: its user's subordinate ids.

Owns: nothing; reads /etc/subuid and /etc/subgid and runs `newuidmap`. Invariant: the warden gets a user namespace in
which 0 is the engine's user and 1 … `count` are ids that the system's administrator gave to that user, and nobody
else's.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import msgspec

from sandbox.errors import CapabilityError
from sandbox.estate.stage import closed_part

_TIMEOUT_S = 10.0
_TOOLS = ("newuidmap", "newgidmap")
MORE_UIDS = (
    "install newuidmap (Debian: apt install uidmap) and give the user a range: usermod --add-subuids FIRST-LAST \
--add-subgids FIRST-LAST USER"
)
"""What an unprivileged user can ask for."""


class SubordinateIds(msgspec.Struct, frozen=True, kw_only=True):
    """Ranges of equal length in the host's numbering."""

    first_uid: int
    first_gid: int
    count: int


def find_subordinate_ids(
    subuid: Path = Path("/etc/subuid"), subgid: Path = Path("/etc/subgid"), uid: int | None = None
) -> SubordinateIds:
    """The longest ranges that this user has been given.

    Raises:
        CapabilityError: there is none, or the tools that map it are missing; with the remedy.
    """
    uid = os.geteuid() if uid is None else uid
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise CapabilityError(f"no {' and no '.join(missing)}", MORE_UIDS)
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        raise CapabilityError(f"uid {uid} has no account, and only accounts have subordinate uids", MORE_UIDS) from None
    ranges = []
    for path in (subuid, subgid):
        try:
            found = longest_range(path.read_text(), name, uid)
        except OSError:
            found = None
        if found is None:
            raise CapabilityError(f"{path} gives {name} no range of ids", MORE_UIDS)
        ranges.append(found)
    (first_uid, num_uids), (first_gid, num_gids) = ranges
    return SubordinateIds(first_uid=first_uid, first_gid=first_gid, count=min(num_uids, num_gids))


def is_own_uid(uid: int | None) -> bool:
    """Is it this (unprivileged) user's: its own, or one of its subordinate uids?"""
    if uid is None or uid == os.geteuid():
        return uid is not None
    try:
        ids = find_subordinate_ids()
    except CapabilityError:
        return False
    return ids.first_uid <= uid < ids.first_uid + ids.count


def longest_range(text: str, name: str, uid: int) -> tuple[int, int] | None:
    """First id and length of the longest range of that user in the text of a subuid file (pure)."""
    best: tuple[int, int] | None = None
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) != 3 or fields[0] not in (name, str(uid)) or not (fields[1].isdigit() and fields[2].isdigit()):
            continue
        first, count = int(fields[1]), int(fields[2])
        if best is None or count > best[1]:
            best = first, count
    return best


def inner_uids(ids: SubordinateIds, slot: int, per_engine: int) -> range:
    """The ids, as the warden's namespace numbers them, of the engine in that slot (pure).

    Raises:
        CapabilityError: the user's range is too short for so many engines.
    """
    first = 1 + slot * per_engine
    if first + per_engine > 1 + ids.count:
        raise CapabilityError(f"{ids.count} subordinate uids are too few for engine {slot + 1} of this user", MORE_UIDS)
    return range(first, first + per_engine)


def require_open(directory: Path) -> None:
    """Checks that any uid can pass through to `directory`, where the staged binaries are.

    Raises:
        CapabilityError: names the first directory on the way that is closed.
    """
    if folder := closed_part(directory):
        remedy = f"chmod o+x {folder}, or choose another with --state-dir"
        raise CapabilityError(f"{folder} is closed to other uids", remedy)


def map_ids(pid: int, ids: SubordinateIds) -> None:
    """Gives the new user namespace of process `pid` its ids (blocking, milliseconds).

    Raises:
        CapabilityError: the system's tools refuse; in their own words.
    """
    for tool, own, first in ((_TOOLS[0], os.geteuid(), ids.first_uid), (_TOOLS[1], os.getegid(), ids.first_gid)):
        command = [tool, str(pid), *map(str, (0, own, 1, 1, first, ids.count))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            raise CapabilityError(f"{tool} does not run: {error}", MORE_UIDS) from error
        if done.returncode != 0:
            raise CapabilityError(f"{tool} refuses: {done.stderr.strip()}", MORE_UIDS)
