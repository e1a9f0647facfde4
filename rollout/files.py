"""Reads files that users name: whole, bounded, and only if they are files.

Invariant: whatever is wrong with the file is a `ConfigError` that names what it was given for; nothing waits for a
pipe, and nothing reads a device that never ends.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from rollout.errors import ConfigError

GIB = 1 << 30


def read_file(path: Path, field: str, *, max_bytes: int = 4 * GIB) -> bytes:
    """The bytes of a regular file.

    Args:
        path: whose; links are followed.
        field: what the file was given for (a flag, or a setting), for the error.
        max_bytes: a longer file is refused.

    Raises:
        ConfigError: it cannot be read, is no regular file, or is too long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ConfigError(field, str(path), "must be a regular file")
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(field, str(path), f"cannot be read ({error.strerror})") from None
    if len(data) > max_bytes:
        raise ConfigError(field, str(path), f"is longer than {max_bytes} bytes")
    return data


def read_text_file(path: Path, field: str, *, max_bytes: int = 4 * GIB) -> bytes:
    """`read_file`, unzipped where the name ends in `.gz`; `max_bytes` bounds what comes out, too."""
    data = read_file(path, field, max_bytes=max_bytes)
    if path.suffix != ".gz":
        return data
    try:
        with gzip.open(io.BytesIO(data)) as unzipped:
            data = unzipped.read(max_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(field, str(path), f"cannot be read (no whole gzip file: {error})") from None
    if len(data) > max_bytes:
        raise ConfigError(field, str(path), f"is longer than {max_bytes} bytes when unzipped")
    return data


def read_lines(path: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of every line that is not blank, gzipped or not; errors as in `read_text_file`."""
    for number, line in enumerate(read_text_file(path, field).split(b"\n"), start=1):
        if line.strip():
            yield number, line
