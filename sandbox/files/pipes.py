"""Trees of files through the pipes of a helper inside.

Owns: the engine's ends of those pipes while a transfer lasts. Invariant: nothing that the inside does or leaves undone
holds up a thread or the loop (only reading the caller's own source does, in a thread of that transfer's own, so that
no other work waits for it), and leaving ends the helper.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO

import anyio
import anyio.to_thread

from sandbox.commands.live import ReadingEnd, StdinPipe
from sandbox.errors import ConfigError, ProtocolError, TransferError
from sandbox.files.caps import FullCaps
from sandbox.files.download import TarBuilder
from sandbox.files.records import RecordKind, RecordReader
from sandbox.files.transfer import check_put, open_pipe
from sandbox.files.tree import Survey, survey, tree_records
from sandbox.files.upload import Tally, batched, tar_records
from sandbox.protocol.requests import Requests
from sandbox.protocol.wire import Kind, Tag, caps_item, text
from sandbox.types import MIB, SandboxSpec, TarDownload, TarReport

_BASE_TIMEOUT_S = 60.0
_SLOWEST_BYTES_PER_S = 4 * MIB


def time_for(num_bytes: int) -> float:
    """How many seconds a transfer of that size may take."""
    return _BASE_TIMEOUT_S + num_bytes / _SLOWEST_BYTES_PER_S


async def send_tree(
    requests: Requests,
    where: str,
    make_records: Callable[[], Iterator[bytes]],
    timeout_s: float,
    limiter: anyio.CapacityLimiter | None = None,
) -> None:
    """Unpacks records below a directory inside.

    Args:
        make_records: gives them; is called and read in a thread.
        limiter: of the threads that read; None for the default one, which everything shares.

    Raises:
        TransferError: the inside cannot make something of it; names it.
        SandboxDiedError: the sandbox has ended.
    """
    theirs, ours = open_pipe(writing=True)
    target = StdinPipe(ours)
    try:
        their_report, ours = open_pipe(writing=False)
    except BaseException:
        target.close()
        os.close(theirs)
        raise
    report = ReadingEnd(ours)
    items = [text(Tag.PATH, where)]
    try:
        with anyio.fail_after(timeout_s):
            async with requests.helper(Kind.UNPACK, items, [theirs, their_report], [target, report]) as end:
                pieces = batched(make_records())
                while (piece := await anyio.to_thread.run_sync(next, pieces, None, limiter=limiter)) is not None:
                    if not await target.write(piece):
                        break  # the helper has ended before its time, and says why
                target.close()
                frame = await end
        _check_report(where, report)
        check_put(where, frame)
    except TimeoutError:
        raise TransferError(where, f"not written within {timeout_s:.0f} s") from None
    finally:
        target.close()
        report.close()


async def upload_tar(requests: Requests, source: bytes | BinaryIO, where: str, caps: FullCaps) -> TarReport:
    """Unpacks a tar; see `Sandbox.upload_tar`."""
    stream = io.BytesIO(source) if isinstance(source, bytes) else source
    tally, timeout_s, limiter = Tally(), time_for(caps.max_bytes), anyio.CapacityLimiter(1)
    if stream.seekable():
        try:
            with anyio.fail_after(timeout_s):
                await _check_whole(stream, caps, limiter)
        except TimeoutError:
            raise TransferError(where, f"its source was not read within {timeout_s:.0f} s") from None
    await send_tree(requests, where, lambda: tar_records(stream, caps, tally), timeout_s, limiter)
    return TarReport(num_files=tally.num_files, num_directories=tally.num_directories, num_bytes=tally.num_bytes)


async def _check_whole(stream: BinaryIO, caps: FullCaps, limiter: anyio.CapacityLimiter) -> None:
    start = stream.tell()
    pieces = batched(tar_records(stream, caps, Tally(), content=False))
    while await anyio.to_thread.run_sync(next, pieces, None, limiter=limiter) is not None:
        continue  # so that a deadline or a cancellation is felt between the pieces
    stream.seek(start)


async def survey_tree(spec: SandboxSpec) -> Survey | None:
    """Looks at the directory that a sandbox's workspace is to start with; ConfigError where it will not do."""
    if spec.workspace is None:
        return None
    return await anyio.to_thread.run_sync(survey, spec.workspace, spec.limits)


async def send_survey(requests: Requests, found: Survey) -> None:
    """Copies that directory into the workspace.

    Raises:
        TransferError: it has changed so since it was looked at that it cannot be read, or does not fit, any more.
        SandboxDiedError: the sandbox has ended.
    """
    try:
        await send_tree(requests, "/workspace", lambda: tree_records(found.root), time_for(found.num_bytes))
    except ConfigError as error:
        raise TransferError(str(error.value), error.remedy) from None


def _check_report(where: str, report: ReadingEnd) -> None:
    """Raises what the helper, which has ended, said about a failure."""
    try:
        events = RecordReader().take(report.read_now())
    except (BlockingIOError, ProtocolError):
        return  # it said nothing that can be understood; its exit code is looked at next
    for event in events:
        if event is not None and not isinstance(event, bytes) and event.kind is RecordKind.FAILED:
            raise TransferError(f"{where}/{event.path}", os.strerror(event.error), event.error)


async def fetch_tree(requests: Requests, where: str, caps: FullCaps) -> TarDownload:
    """Packs what lies below a directory inside.

    Raises:
        TransferError: no such directory, or it does not fit.
        SandboxDiedError: the sandbox has ended.
    """
    timeout_s = time_for(caps.max_bytes)
    builder = TarBuilder(where, caps.max_bytes, caps.max_entries)
    theirs, ours = open_pipe(writing=False)
    source = ReadingEnd(ours)
    try:
        with anyio.fail_after(timeout_s):
            items = [text(Tag.PATH, where), caps_item(caps.max_bytes, caps.max_entries)]
            async with requests.helper(Kind.PACK, items, [theirs], [source]) as end:
                while piece := await source.read():
                    await anyio.to_thread.run_sync(builder.feed, piece)
                frame = await end
    except TimeoutError:
        raise TransferError(where, f"not read within {timeout_s:.0f} s") from None
    finally:
        source.close()
    check_put(where, frame)
    if not builder.finished:
        raise TransferError(where, "its reader ended too early")
    return await anyio.to_thread.run_sync(builder.result)
