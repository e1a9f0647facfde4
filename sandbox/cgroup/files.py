"""Reading and writing cgroup files: small, synchronous, never retried."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sandbox.errors import SandboxDiedError
from sandbox.exhaustion import fault


@contextmanager
def vanishing() -> Iterator[None]:
    """Around the use of a sandbox's control groups, which the warden may have removed before its end is noticed.

    Raises:
        SandboxDiedError: they are gone.
        SandboxError: they are there, and cannot be used (no descriptors, no memory): the sandbox lives.
    """
    try:
        yield
    except OSError as error:
        if gone(error):
            raise SandboxDiedError("the sandbox has died (its control groups are gone)") from error
        raise fault("the sandbox's control groups cannot be used", error.errno) from error


def gone(error: OSError) -> bool:
    """Does it say that a control group was removed?"""
    return error.errno in (errno.ENOENT, errno.ENODEV)


def read(path: str) -> str:
    """The whole text of a small file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 65536).decode()
    finally:
        os.close(fd)


def write(path: str, value: str) -> None:
    """Writes in one system call, as cgroup files want it."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def carry_out(make: Iterable[str], writes: Iterable[tuple[str, str]]) -> None:
    """Makes directories (there already: fine) and writes values, in order."""
    for directory in make:
        with suppress(FileExistsError):
            os.mkdir(directory)
    for path, value in writes:
        write(path, value)


def keyed(path: str, key: str) -> int:
    """One number of a `key value` file; 0 where the key is absent."""
    for line in read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def populated(directory: str) -> bool:
    """Does a v2 cgroup (or one below it) hold a live process?"""
    return keyed(f"{directory}/cgroup.events", "populated") == 1


def remove_tree(directory: str) -> None:
    """Removes a cgroup directory and everything below it.

    Raises:
        OSError: EBUSY while a process is left.
    """
    path = Path(directory)
    if not path.is_dir():
        return
    for child in list(path.iterdir()):
        if child.is_dir():
            remove_tree(str(child))
    path.rmdir()


def kill_tree(directory: str) -> None:
    """Kills every process at or below a cgroup directory, by `cgroup.kill` or one by one."""
    kill_file = f"{directory}/cgroup.kill"
    if os.path.exists(kill_file):
        write(kill_file, "1")
        return
    for procs in Path(directory).rglob("cgroup.procs"):
        for pid in procs.read_text().split():
            try:
                os.kill(int(pid), 9)
            except ProcessLookupError:
                continue
