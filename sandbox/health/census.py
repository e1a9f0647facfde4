"""Counts what dead engines left on this host, and what living ones hold.

Owns: nothing; only reads. Invariant: a thing is a leftover only when no living process answers for it: an engine's
slot is alive while its lock is held by a living engine, and everything below a living warden belongs to it. A warden
whose engine is dead is still cleaning up; until it ends, it and what it holds are leftovers too.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sandbox.estate.state import lock_is_held, read_record, require_readable
from sandbox.estate.subuid import is_own_uid
from sandbox.health.processes import ProcessInfo, ancestors, real_uid, snapshot, with_descendants
from sandbox.jails.plan import AGENT_PATH
from sandbox.layers.collecting import stale_layers

CGROUP_NAME = re.compile(r"rollout-\d+-(\d+)")
_STALE_S = 600.0
_SCRATCH = ("bin/.stage-*", "images/.building-*", "images/.python-link-*")


class Engine(msgspec.Struct, frozen=True):
    """What one slot of the state directory says."""

    slot: Path
    pid: int
    cgroups: tuple[str, ...]
    alive: bool
    ending: bool
    """Its process is dead, and its warden still cleans up."""


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """Everything found; the tuples hold paths, or `pid name`."""

    state_dir: str
    engines: tuple[int, ...] = ()
    """Process numbers of living engines; nothing of theirs is below."""
    dead_engines: tuple[str, ...] = ()
    """Slots whose engine ended without cleaning up."""
    processes: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    """Below the state directory; sandboxes mount in namespaces of their own, so there should never be one."""
    directories: tuple[str, ...] = ()
    """Half-made copies of staged binaries and images; layers that nobody holds, keeps, or has completed."""
    shared_memory: tuple[str, ...] = ()
    """Named objects in /dev/shm; anonymous memory dies with the processes that hold it."""

    @property
    def total(self) -> int:
        """Number of leftovers of every kind."""
        kinds = (self.dead_engines, self.processes, self.cgroups, self.mounts, self.directories, self.shared_memory)
        return sum(len(kind) for kind in kinds)


def take_census(state_dir: Path) -> Census:
    """Look at everything; takes some milliseconds for each thousand processes and cgroups. Changes nothing.

    Raises:
        ConfigError: the state directory is none, or closed to this user.
    """
    require_readable(state_dir)
    table = snapshot()
    engines = read_engines(state_dir, table)
    return Census(
        state_dir=str(state_dir),
        engines=tuple(engine.pid for engine in engines if engine.alive),
        dead_engines=tuple(str(engine.slot) for engine in engines if not engine.alive),
        processes=tuple(f"{info.pid} {info.name}" for info in dead_processes(state_dir, engines, table)),
        cgroups=tuple(dead_cgroups(engines, table)),
        mounts=tuple(mounts_below(state_dir)),
        directories=tuple(str(path) for path in (*stale_directories(state_dir), *stale_layers(state_dir))),
        shared_memory=tuple(str(path) for path in Path("/dev/shm").glob("rollout-*")),
    )


def read_engines(state_dir: Path, table: Mapping[int, ProcessInfo]) -> list[Engine]:
    """Every slot that has a record."""
    engines = []
    for path in sorted((state_dir / "engines").glob("[0-9]*")):
        try:
            record = read_record(path)
        except FileNotFoundError:
            continue
        held = lock_is_held(state_dir, path)
        alive = held and record.pid in table
        engines.append(Engine(path, record.pid, record.cgroups, alive, held and not alive))
    return engines


def dead_processes(state_dir: Path, engines: list[Engine], table: Mapping[int, ProcessInfo]) -> list[ProcessInfo]:
    """Wardens of dead engines, jails without a living warden, what descends from both, and dead cgroups' members."""
    living = {engine.pid for engine in engines if engine.alive}
    staged = f"{state_dir.absolute()}/bin/"
    helpers = {_identity(path) for path in state_dir.glob("bin/native-*/rollout-native")}
    roots = []
    for info in table.values():
        if info.words[:1] != (AGENT_PATH,) and not (info.words and info.words[0].startswith(staged)):
            continue
        if is_warden(info):
            answered_for = info.parent in living
        else:
            has_warden = any(is_warden(above) for above in ancestors(info.pid, table))
            answered_for = has_warden or _in_living_cgroup(info.pid, table) or _staged_elsewhere(info, helpers)
        if not answered_for:
            roots.append(info.pid)
    for engine in engines:
        if not engine.alive:
            roots += [pid for directory in engine.cgroups for pid in _members(directory)]
    return with_descendants(roots, table)


def is_warden(info: ProcessInfo) -> bool:
    """A warden of any state directory."""
    return len(info.words) > 1 and info.words[0].endswith("/rollout-native") and info.words[1] == "warden"


def dead_cgroups(engines: list[Engine], table: Mapping[int, ProcessInfo]) -> Iterator[str]:
    """Parent cgroups of dead engines: of those on record here, and of those whose process is not there any more.

    Another user's are that user's to remove, or root's.
    """
    living = {directory for engine in engines if engine.alive for directory in engine.cgroups}
    for directory in engine_cgroups():
        match = CGROUP_NAME.fullmatch(os.path.basename(directory))
        if directory in living or match is None or int(match[1]) in table or not _is_ours(directory):
            continue
        # A member shown as 0 lives in a process namespace that we cannot see: not ours to judge.
        if 0 not in _members(directory):
            yield directory


def _is_ours(directory: str) -> bool:
    try:
        return os.geteuid() == 0 or os.stat(directory).st_uid == os.geteuid()
    except FileNotFoundError:
        return False  # removed meanwhile


def engine_cgroups() -> Iterator[str]:
    """Every engine's parent cgroup in every hierarchy of this host."""
    with open("/proc/self/mountinfo") as file:
        lines = [line.split() for line in file]
    points = [line[4] for line in lines if line[line.index("-") + 1] in ("cgroup", "cgroup2")]
    for point in points:
        for directory, names, _ in os.walk(point):
            for name in list(names):
                if CGROUP_NAME.fullmatch(name):
                    names.remove(name)
                    yield f"{directory}/{name}"


def mounts_below(state_dir: Path) -> Iterator[str]:
    """Mount points strictly below the state directory, in our own mount namespace."""
    prefix = f"{state_dir.absolute()}/"
    with open("/proc/self/mountinfo") as file:
        for line in file:
            point = line.split()[4].encode().decode("unicode_escape")
            if point.startswith(prefix):
                yield point


def stale_directories(state_dir: Path) -> Iterator[Path]:
    """Scratch copies that nobody has touched for ten minutes: a builder takes seconds."""
    for pattern in _SCRATCH:
        for path in state_dir.glob(pattern):
            try:
                if time.time() - path.lstat().st_mtime > _STALE_S:
                    yield path
            except FileNotFoundError:
                continue


def _identity(path: Path | str) -> tuple[int, int] | None:
    """Device and number of a file that still has a name; None when it has none or may not be looked at."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino) if stat.st_nlink else None


def _staged_elsewhere(info: ProcessInfo, helpers: set[tuple[int, int] | None]) -> bool:
    """Was this agent started by another user, or (which only root can see) from another state directory?"""
    if os.geteuid() != 0:
        return not is_own_uid(real_uid(info.pid))
    helper = _identity(f"/proc/{info.pid}/exe")
    return helper is not None and helper not in helpers


def _in_living_cgroup(pid: int, table: Mapping[int, ProcessInfo]) -> bool:
    """Is it in the cgroup of an engine that lives? (Its warden may have died a moment ago.)"""
    try:
        text = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False
    return any(int(match[1]) in table for match in CGROUP_NAME.finditer(text))


def _members(directory: str) -> list[int]:
    pids: list[int] = []
    for folder, _, _ in os.walk(directory):
        try:
            pids += [int(word) for word in Path(folder, "cgroup.procs").read_text().split()]
        except OSError:
            continue  # removed meanwhile
    return pids
