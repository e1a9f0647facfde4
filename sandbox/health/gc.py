"""Removes what dead engines left, and nothing else.

Owns: the order of removal. Invariant: only what `census` counts as a leftover is touched; a warden that still cleans
up after its engine is given time to end by itself; everything is looked at again after each step.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import msgspec

from sandbox.estate.state import destroy_cgroup, reconcile
from sandbox.health.census import Census, dead_cgroups, dead_processes, read_engines, take_census
from sandbox.health.processes import ProcessInfo, kill, lives, snapshot
from sandbox.layers.collecting import collect_layers
from sandbox.layers.folder import FOLDER
from sandbox.types import GIB

MAX_LAYER_BYTES = 10 * GIB
_POLL_S = 0.02
_KILL_TIMEOUT_S = 2.0


class Collection(msgspec.Struct, frozen=True, kw_only=True):
    """What was removed, and what is still there."""

    removed: tuple[str, ...]
    failed: tuple[str, ...]
    """What could not be removed, each with the reason."""
    left: Census


def collect(state_dir: Path, patience_s: float = 3.0, max_layer_bytes: int = MAX_LAYER_BYTES) -> Collection:
    """Remove every leftover; blocks up to about `patience_s`, 2 s for what must be killed, and 5 s more for each cgroup
    that does not empty.

    Args:
        state_dir: whose engines; cgroups of engines with other, deleted state directories go too.
        patience_s: how long wardens of dead engines may take to clean up by themselves.
        max_layer_bytes: of the disk; kept layers that are not in use go beyond it, the longest unused first.

    Raises:
        ConfigError: the state directory is none, or closed to this user; nothing was touched.
    """
    before = take_census(state_dir)
    failed: list[str] = []
    _await_wardens(state_dir, patience_s)
    _kill_processes(state_dir, failed)
    if (state_dir / "engines").is_dir():
        try:
            reconcile(state_dir)
        except OSError as error:
            failed.append(f"{error.filename or state_dir}: {error.strerror}")
    _remove_cgroups(state_dir, failed)
    layers: list[str] = []
    try:
        layers += map(str, collect_layers(state_dir, max_layer_bytes))
    except OSError as error:
        failed.append(f"{error.filename or state_dir / FOLDER}: {error.strerror}")
    for mount in before.mounts:
        _unmount(mount, failed)
    for path in (*before.directories, *before.shared_memory):
        if Path(path).parent != state_dir / FOLDER:
            _remove(Path(path), failed)
    left = take_census(state_dir)
    kept = tuple(f"layer: {path}" for path in layers if path not in before.directories)
    return Collection(removed=(*_difference(before, left), *kept), failed=tuple(failed), left=left)


def _await_wardens(state_dir: Path, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if not any(engine.ending for engine in read_engines(state_dir, snapshot())):
            return
        time.sleep(_POLL_S)


def _kill_processes(state_dir: Path, failed: list[str]) -> None:
    """Kill until none is left: a process may fork while we look.

    Once its warden is dead nothing tells whose a process was, so those that were seen are remembered until they end.
    """
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    seen: set[ProcessInfo] = set()
    while time.monotonic() < deadline:
        table = snapshot()
        seen |= set(dead_processes(state_dir, read_engines(state_dir, table), table))
        seen = {info for info in seen if lives(info)}
        if not seen:
            return
        for info in seen:
            try:
                kill(info)
            except PermissionError as error:
                failed.append(f"process {info.pid} ({info.name}): {error.strerror}")
                return
        time.sleep(_POLL_S)
    failed += [f"process {info.pid} ({info.name}): does not end" for info in seen]


def _remove_cgroups(state_dir: Path, failed: list[str]) -> None:
    table = snapshot()
    for directory in dead_cgroups(read_engines(state_dir, table), table):
        try:
            destroy_cgroup(directory)
        except OSError as error:
            failed.append(f"{directory}: {error.strerror}")


def _unmount(point: str, failed: list[str]) -> None:
    done = subprocess.run(["umount", "--lazy", point], capture_output=True, text=True, timeout=10)
    if done.returncode != 0:
        failed.append(f"{point}: {done.stderr.strip()}")


def _remove(path: Path, failed: list[str]) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        failed.append(f"{path}: {error.strerror}")


def _difference(before: Census, after: Census) -> tuple[str, ...]:
    kinds = ("dead_engines", "processes", "cgroups", "mounts", "directories", "shared_memory")
    return tuple(
        f"{kind.replace('_', ' ')}: {entry}"
        for kind in kinds
        for entry in getattr(before, kind)
        if entry not in getattr(after, kind)
    )
