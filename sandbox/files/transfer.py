"""Single files across the boundary, and the checks on them that are made on the engine's side.

Invariant: the agent shares a kernel namespace with hostile code, so a passed descriptor is believed only as far as
its own `fstat` goes, and never read past the agreed cap.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence

import anyio

from sandbox.checking import check_count, check_text
from sandbox.commands.streams import Feed
from sandbox.errors import ConfigError, SandboxError, TransferError
from sandbox.exhaustion import fault
from sandbox.files.caps import MAX_BYTES
from sandbox.protocol.requests import Requests
from sandbox.protocol.wire import Frame, Kind, Tag, number, text

_READ_ON_LOOP_BYTES = 256 * 1024
_PUT_TIMEOUT_S = 60.0
_MAX_PATH_BYTES = 4095  # PATH_MAX without its NUL


async def put_file(requests: Requests, path: str, data: bytes, mode: int) -> None:
    """Writes a file inside; see `Sandbox.write_file`."""
    where = absolute(path)
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ConfigError("data", type(data).__name__, "must be bytes; encode text first")
    check_count("mode", mode, 0, 0o7777)
    child, ours = open_pipe(writing=True)
    feed = Feed(ours, data)
    try:
        with anyio.fail_after(_PUT_TIMEOUT_S):
            items = [text(Tag.PATH, where), number(Tag.MODE, mode)]
            async with requests.helper(Kind.PUT, items, [child], [feed]) as end:
                frame = await end
    except TimeoutError:
        raise TransferError(path, f"not written within {_PUT_TIMEOUT_S} s") from None
    finally:
        feed.stop()
    check_put(path, frame)


async def get_file(requests: Requests, path: str, max_bytes: int) -> bytes:
    """Reads a file inside; see `Sandbox.read_file`."""
    check_count("max_bytes", max_bytes, 0, MAX_BYTES)
    frame, fds = await requests.ask(Kind.GET, [text(Tag.PATH, absolute(path))])
    try:
        return await read_passed(path, frame, fds, max_bytes)
    finally:
        for fd in fds:
            os.close(fd)


async def read_passed(path: str, frame: Frame, fds: Sequence[int], max_bytes: int) -> bytes:
    """The content of a file that the agent opened; the caller closes the descriptors.

    Raises:
        TransferError: it was refused, is not a regular file, or is larger than `max_bytes`.
    """
    if frame.kind != Kind.OPENED or len(fds) != 1:
        code = frame.errno(errno.EPROTO)
        raise TransferError(path, refusal(code), code)
    info = os.fstat(fds[0])
    if not stat.S_ISREG(info.st_mode):
        raise TransferError(path, "not a regular file")
    if info.st_size > max_bytes:
        raise TransferError(path, f"{info.st_size} bytes are over the cap of {max_bytes}", errno.EFBIG)
    try:
        if info.st_size <= _READ_ON_LOOP_BYTES:
            return read_all(fds[0], info.st_size)
        return await anyio.to_thread.run_sync(read_all, fds[0], info.st_size)  # cancelled only when it is through
    except OSError as error:  # a descriptor that cannot be read from, of hostile making
        raise TransferError(path, f"cannot be read ({error.strerror})", error.errno or errno.EIO) from None


def open_pipe(*, writing: bool) -> tuple[int, int]:
    """A pipe to or from a helper inside: its end, and ours, which is non-blocking.

    Raises:
        SandboxError: no descriptors are left.
    """
    try:
        reader, writer = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        raise fault("no descriptors for a transfer", error.errno) from error
    theirs, ours = (reader, writer) if writing else (writer, reader)
    os.set_blocking(ours, False)
    return theirs, ours


def absolute(path: str) -> str:
    """A path inside; relative ones start in the workspace."""
    if not isinstance(path, str) or not path:
        raise ConfigError("path", path, "must be a non-empty string")
    check_text("path", path)
    whole = path if path.startswith("/") else f"/workspace/{path}"
    if (length := len(os.fsencode(whole))) > _MAX_PATH_BYTES:
        raise ConfigError("path", f"{path[:64]}…", f"is {length} bytes long; at most {_MAX_PATH_BYTES}")
    return whole


def refusal(code: int) -> str:
    """Words for the errno of a refused open."""
    if code == errno.EINVAL:
        return "not a regular file"
    if code == errno.ELOOP:
        return "a symbolic link"
    return os.strerror(code)


def check_put(path: str, frame: Frame) -> None:
    """Raises what a helper's end says, if it failed."""
    if frame.kind != Kind.EXITED:
        code = frame.errno(errno.EPROTO)
        raise TransferError(path, refusal(code), code)
    result = frame.result()
    if result.setup_errno:
        raise SandboxError(f"a transfer could not be prepared: {os.strerror(result.setup_errno)}")
    if not os.WIFEXITED(result.status):
        raise TransferError(path, f"its helper was killed by signal {os.WTERMSIG(result.status)}")
    code = os.WEXITSTATUS(result.status)
    if code:
        raise TransferError(path, refusal(code), code)


def read_all(fd: int, size: int) -> bytes:
    """At most `size` bytes from the start of a regular file."""
    parts: list[bytes] = []
    at = 0
    while at < size:
        part = os.pread(fd, size - at, at)
        if not part:
            break  # it has shrunk meanwhile
        parts.append(part)
        at += len(part)
    return b"".join(parts)
