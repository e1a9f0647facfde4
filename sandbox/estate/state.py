"""The state directory: who lives, what the dead left, and which uids are whose.

Owns: `engines/<slot>/` with one lock and one record per engine. The lock is held by the engine and its warden
together, so a slot is free only when both have ended. Invariant: reconciling touches nothing whose lock is held.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sandbox.cgroup import files
from sandbox.errors import CapabilityError, ConfigError
from sandbox.estate.locks import HeldLock
from sandbox.estate.stage import require_reachable, writing_below
from sandbox.exhaustion import exhausted_writing

UIDS_PER_ENGINE = 16_384
_EMPTY_WAIT_S = 5.0
_PASSING = (errno.EBUSY, errno.ENOENT, errno.ENODEV)
"""What a cgroup answers that is still occupied, or that somebody else removes at the same time."""


STATE_DIR_VARIABLE = "ROLLOUT_STATE_DIR"


def default_state_dir() -> Path:
    """`$ROLLOUT_STATE_DIR`; else `/var/lib/rollout` for root, and `rollout` in another user's state directory."""
    if named := os.environ.get(STATE_DIR_VARIABLE):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/lib/rollout")
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base) / "rollout" if base else Path.home() / ".local" / "state" / "rollout"


def require_mapped(uid_map: str, first: int, count: int) -> None:
    """Checks that the user namespace of this process has the uids of the sandboxes (text of /proc/self/uid_map).

    Raises:
        ConfigError: names the range that it has.
    """
    ranges = [tuple(map(int, line.split())) for line in uid_map.splitlines()]
    if not any(inside <= first and first + count <= inside + length for inside, _, length in ranges):
        known = ", ".join(f"{inside}-{inside + length - 1}" for inside, _, length in ranges)
        raise ConfigError("sandbox.uid_base", first, f"{count} uids from there are needed, and only {known} exist here")


class Record(msgspec.Struct, frozen=True):
    """What an engine would leave behind if it were killed now."""

    pid: int
    cgroups: tuple[str, ...] = ()


def read_record(slot: Path) -> Record:
    """A slot's record; one that a crash of the host left unreadable names no process (0) and nothing to remove.

    Raises:
        FileNotFoundError: it has none.
    """
    try:
        return msgspec.json.decode((slot / "record.json").read_bytes(), type=Record)
    except msgspec.DecodeError:
        return Record(0)


def require_readable(path: Path) -> None:
    """Checks that what a state directory holds can be looked at; one that does not exist holds nothing.

    Raises:
        ConfigError: it is something else than a directory, or closed to this user.
    """
    for folder in (path, path / "engines"):
        try:
            entries = os.scandir(folder)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            raise ConfigError("state_dir", str(path), "is not a directory; name the one that engines use") from None
        except OSError as error:
            remedy = f"cannot be read ({error.strerror}); run this as the user whose engines use it, or name another"
            raise ConfigError("state_dir", str(path), remedy) from None
        entries.close()
    if (path / "engines" / ".lock").exists() and not os.access(path / "engines" / ".lock", os.R_OK | os.W_OK):
        raise ConfigError("state_dir", str(path), "belongs to another user; run this as that user, or name another")


def open_state_dir(path: Path) -> Path:
    """Makes the directory and its parts where they are missing; what is there already keeps its mode.

    Raises:
        ConfigError: it cannot be written, or (as root) other uids cannot pass through to it.
    """
    path = path.absolute()
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError("state_dir", str(path), "must be valid UTF-8; choose another") from None
    try:
        for folder in (path, path / "bin", path / "engines"):
            _make_folder(folder)
        if not os.access(path / "engines", os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        full = exhausted_writing(str(path), error)
        remedy = f"cannot be written ({error.strerror}); choose another"
        raise full or ConfigError("state_dir", str(path), remedy) from None
    _require_own(path)
    if os.geteuid() == 0:
        with writing_below(path):
            require_reachable(path / "bin")
    return path


def _require_own(path: Path) -> None:
    """Checks that nobody else can put something in the place of what is staged and run from there."""
    for folder in (path, path / "bin", path / "engines", path / "images"):
        try:
            found = folder.lstat()
        except FileNotFoundError:
            continue  # images are made later
        shared = found.st_mode & 0o022 and not (folder == path and found.st_mode & stat.S_ISVTX)
        foreign = found.st_uid not in (os.geteuid(), 0) or (folder != path and found.st_uid != os.geteuid())
        if shared or foreign:
            why = f"belongs to uid {found.st_uid}" if foreign else "can be written by other users"
            remedy = f"{folder} {why}, who could replace what runs from there; choose another"
            raise ConfigError("state_dir", str(path), remedy)


def _make_folder(path: Path) -> None:
    """Makes a directory and those above it; as root they are open to all uids, whatever the umask."""
    for folder in reversed((path, *path.parents)):
        if folder.is_dir():
            continue
        folder.mkdir(mode=0o755, exist_ok=True)
        if os.geteuid() == 0:
            folder.chmod(0o755)


@contextmanager
def _registry_lock(state_dir: Path) -> Iterator[None]:
    """Held for moments only: while slots are claimed or cleaned."""
    fd = os.open(state_dir / "engines" / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _try_lock(slot: Path) -> int | None:
    """A locked descriptor of a slot's lock file, or None while its owner lives."""
    fd = os.open(slot / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def lock_is_held(state_dir: Path, slot: Path) -> bool:
    """Does a living engine, or its warden, hold this slot?

    Raises:
        PermissionError: the state directory belongs to another user.
    """
    with _registry_lock(state_dir):  # so that looking is not mistaken for claiming
        fd = _try_lock(slot)
    if fd is None:
        return True
    os.close(fd)
    return False


class Slot(HeldLock):
    """One engine's place: a directory, a lock, a number that gives its uids. Close it when all is gone."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.number = int(path.name)
        super().__init__(lock_fd)

    def record(self, cgroups: tuple[str, ...]) -> None:
        """Writes down, by rename, what would be left after a crash; ConfigError when it cannot be written."""
        scratch = self.path / "record.tmp"
        with writing_below(self.path.parents[1]):
            with scratch.open("wb") as file:
                file.write(msgspec.json.encode(Record(os.getpid(), cgroups)))
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(self.record_path)

    @property
    def record_path(self) -> Path:
        """The record; gone once nothing is left."""
        return self.path / "record.json"

    def forget(self) -> None:
        """Removes the record: nothing of this engine is left."""
        self.record_path.unlink(missing_ok=True)


def claim_slot(state_dir: Path, num_slots: int) -> Slot:
    """Cleans up after dead engines, then takes the first free slot.

    Raises:
        ConfigError: the state directory cannot be written, or what a dead engine left cannot be removed.
        CapabilityError: every slot belongs to a living engine.
    """
    with writing_below(state_dir), _registry_lock(state_dir):
        _reconcile(state_dir)
        for number in range(num_slots):
            path = state_dir / "engines" / str(number)
            path.mkdir(mode=0o755, exist_ok=True)
            lock_fd = _try_lock(path)
            if lock_fd is not None:
                return Slot(path, lock_fd)
    raise CapabilityError(f"{num_slots} engines use {state_dir} already", "raise uid_count, or use another state_dir")


def reconcile(state_dir: Path) -> list[str]:
    """Kills and removes what dead engines left; returns what was removed."""
    with _registry_lock(state_dir):
        return _reconcile(state_dir)


def _reconcile(state_dir: Path) -> list[str]:
    removed: list[str] = []
    for path in sorted((state_dir / "engines").iterdir()):
        if not path.name.isdigit() or not (path / "record.json").exists():
            continue
        lock_fd = _try_lock(path)
        if lock_fd is None:
            continue
        try:
            record = read_record(path)
            for directory in record.cgroups:
                if os.path.isdir(directory):
                    destroy_cgroup(directory)
                    removed.append(directory)
            (path / "record.json").unlink()
        finally:
            os.close(lock_fd)
    return removed


def destroy_cgroup(directory: str) -> None:
    """Kills everything in a cgroup and removes it, waiting a few seconds for it to empty.

    Others may remove it at the same time: what is gone is gone.

    Raises:
        OSError: it is still occupied after that.
    """
    deadline = time.monotonic() + _EMPTY_WAIT_S
    while os.path.isdir(directory):
        for step in (files.remove_tree, files.kill_tree):
            try:
                step(directory)
            except OSError as error:
                if error.errno not in _PASSING or time.monotonic() > deadline:
                    raise
            if not os.path.isdir(directory):
                return
        time.sleep(0.005)
