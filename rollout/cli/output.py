"""How commands write results: whole, or not at all.

Invariant: every byte reaches the descriptor or an exception says that it did not. (`print` gives no such promise:
with PYTHONUNBUFFERED a write that a signal cuts short loses its rest silently.)
"""

from __future__ import annotations

import os
import select
import sys
from typing import Any

import msgspec


def print_json(value: Any) -> None:
    """Writes `value` (plain data or structs) to stdout as one line of JSON."""
    write_stdout(msgspec.json.encode(value) + b"\n")


def write_stdout(data: bytes) -> None:
    """Writes all of `data` to stdout, after what was printed before."""
    sys.stdout.flush()
    view = memoryview(data)
    while view:
        view = view[sys.stdout.buffer.write(view) or 0 :]
    sys.stdout.buffer.flush()


def write_descriptor(descriptor: int, data: bytes) -> None:
    """Writes all of `data` to a descriptor, blocking or not."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # somebody left our end of a pipe non-blocking
            select.select([], [descriptor], [])
