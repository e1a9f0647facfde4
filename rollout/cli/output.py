"""How commands write results: whole, or not at all; and the standard streams that they write to.

Invariant: every byte of a result reaches stdout or an exception says that it did not, whoever wrote it (`print`, rich
or `print_json`), and wherever it was written from. (`print` on Python's own stdout gives no such promise: with
PYTHONUNBUFFERED a write that a signal cuts short loses its rest silently, and what is left in the buffer at the end
fails after the exit status was decided.) What is said on stderr is advice: where it cannot be written, it is lost.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any

import msgspec

from rollout.errors import Fault


class OutputError(Fault):
    """A result could not be written to stdout: a full disk, a closed descriptor."""


class ReaderGoneError(Exception):
    """Who read our stdout went away (`rollout … | head`): that is its right, and nothing more is to be done.

    No OSError, so that nothing on the way (rich ends the process for a BrokenPipeError) deals with it but `main`.
    """


class _Stdout(io.FileIO):
    """Descriptor 1: writes all of what it is given, or raises one of the above."""

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        try:
            write_descriptor(self.fileno(), view)
        except BrokenPipeError:
            raise ReaderGoneError from None
        except OSError as error:
            raise OutputError(f"stdout cannot be written: {error.strerror}") from error
        return len(view)


class _Stderr(io.FileIO):
    """Descriptor 2: what cannot be written is dropped; the exit status does not depend on it."""

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        with suppress(OSError):  # as the module says: advice that nobody can read
            write_descriptor(self.fileno(), view)
        return len(view)


def open_standard_streams() -> None:
    """Makes descriptors 0 to 2 and their Python streams fit for use, before anything else is opened.

    A closed descriptor becomes /dev/null: else the next file or socket would get its number (the event loop aborts
    the process then), and would receive what is meant for the stream. Streams that somebody has replaced already, as
    tests do, are left alone.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest free number, and those below are taken
            os.set_inheritable(opened, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (lives as long as the process)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Stdout(1, "w", closefd=False), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Stderr(2, "w", closefd=False), sys.stderr)


def flush_stdout() -> None:
    """Writes what is still buffered.

    Raises:
        OutputError: it cannot be written.
        ReaderGoneError: nobody reads it.
    """
    sys.stdout.flush()


def give_up_stdout() -> None:
    """Points descriptor 1 to /dev/null, so that what is still buffered does not fail again when Python ends."""
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(getattr(sys.stdout.buffer, "raw", None), _Stdout):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


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


def write_descriptor(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data` to a descriptor, blocking or not."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # somebody left our end of a pipe non-blocking
            select.select([], [descriptor], [])


def _text(raw: io.FileIO, old: Any) -> io.TextIOWrapper:
    """A text stream over `raw`, with the encoding of the stream it replaces; letters beyond it are escaped."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=old.encoding if old is not None else "utf-8",
        errors="backslashreplace",
        line_buffering=raw.fileno() == 2 or raw.isatty(),
    )
