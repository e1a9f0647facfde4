"""The engine's side of the warden: one outside process that starts and ends jails.

Owns: the warden process and the numbers of live jails. Invariant: every request ends with an answer, a deadline
or `SandboxDiedError`; when the warden is gone, every waiter is told.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from sandbox.errors import CapabilityError, ProtocolError, SandboxDiedError, SandboxError, StartError
from sandbox.estate.subuid import SubordinateIds, map_ids
from sandbox.exhaustion import fault, fault_with
from sandbox.health.capabilities import user_namespace_remedy
from sandbox.protocol.link import FrameLink
from sandbox.protocol.wire import VERSION, Frame, Item, Kind, Tag, encode

_HELLO_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 15.0
_SEND_PAUSE_S = 0.05
_READER_TIMEOUT_S = 10.0
_QUESTIONS: dict[int, Kind] = {Kind.RELEASED: Kind.RELEASE, Kind.RENEWED: Kind.RENEW, Kind.SEALED: Kind.SEAL}
"""What each answer answers; the others are a start's."""


class _Answer:
    """A slot for one expected frame."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self.frame: Frame | None = None

    def give(self, frame: Frame | None) -> None:
        self.frame = frame
        self.event.set()


def _spawn(native: Path, end_fd: int, lock_fd: int, ids: SubordinateIds | None) -> subprocess.Popen[bytes]:
    """One short vfork per engine; the warden makes a session of its own, out of the terminal's reach."""
    if ids is None:
        return _execute(native, (end_fd, lock_fd))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = _execute(native, (end_fd, lock_fd, theirs.fileno()))
        theirs.close()
        try:
            _give_ids(process.pid, ours, ids)
        except BaseException:
            process.kill()
            process.wait()
            raise
    return process


def _execute(native: Path, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(native), "warden", *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
    )


def _give_ids(pid: int, sync: socket.socket, ids: SubordinateIds) -> None:
    """Maps the warden's user namespace once it has made it, and lets it go on."""
    sync.settimeout(_HELLO_TIMEOUT_S)
    try:
        answer = sync.recv(1)
    except TimeoutError:
        answer = b""
    if answer != b"\0":
        why = os.strerror(answer[0]) if answer else "no answer"
        raise CapabilityError(f"the warden gets no user namespace: {why}", user_namespace_remedy())
    map_ids(pid, ids)
    sync.sendall(b"g")


class Warden:
    """Client of one warden process. Make it with `open`, end it with `aclose`.

    Args:
        on_died: told the number of a jail whose agent ended unasked.
        on_end: told once when the warden itself is gone.
    """

    def __init__(self, on_died: Callable[[int], None], on_end: Callable[[], None]) -> None:
        self._on_died = on_died
        self._on_end = on_end
        self._answers: dict[tuple[int, Kind], _Answer] = {}  # by jail and question
        self._hello = _Answer()
        self._link: FrameLink | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the warden."""
        assert self._process is not None
        return self._process.pid

    async def open(self, native: Path, lock_fd: int, ids: SubordinateIds | None = None) -> None:
        """Starts the process.

        Args:
            lock_fd: a lock that it holds until the last trace is gone.
            ids: runs it in a user namespace with these, so that it can change to each sandbox's own.

        Raises:
            StartError: it did not answer.
            CapabilityError: it cannot have `ids`; nothing runs.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = await anyio.to_thread.run_sync(_spawn, native, theirs.fileno(), lock_fd, ids)
            except CapabilityError:
                ours.close()
                raise
            except OSError as error:
                ours.close()
                raise fault("the warden cannot be executed", error.errno, StartError) from error
        self._link = FrameLink(ours, self._on_frame, self._on_link_end)
        with anyio.move_on_after(_HELLO_TIMEOUT_S):
            await self._hello.event.wait()
        if self._hello.frame is None or self._hello.frame.ident != VERSION:
            raise StartError("the warden did not answer")

    async def own(self, estate: Sequence[Item], locks: Sequence[int] = ()) -> None:
        """Names what the warden must remove when the engine is gone, instead of what was named before.

        Args:
            locks: descriptors that it holds until that is done; the caller keeps its own.

        Raises:
            SandboxDiedError: the warden has ended.
        """
        if self._link is None:
            raise SandboxDiedError("the warden was not started")
        await self._link.send(encode(Kind.OWN, 0, estate), locks)

    def _on_frame(self, frame: Frame, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if frame.kind == Kind.HELLO:
            self._hello.give(frame)
        elif frame.kind == Kind.DIED:
            self._on_died(frame.ident)
        else:
            question = _QUESTIONS.get(frame.kind, Kind.START)
            answer = self._answers.pop((frame.ident, question), None)
            if answer is not None:  # else the waiter was cancelled
                answer.give(frame)
            for late in (Kind.RENEW, Kind.SEAL) if question == Kind.RELEASE else ():
                unanswered = self._answers.pop((frame.ident, late), None)
                if unanswered is not None:
                    unanswered.give(None)  # the jail ended meanwhile

    def _on_link_end(self, why: str) -> None:
        self._tell_waiters()
        self._on_end()

    def _tell_waiters(self) -> None:
        waiting, self._answers = self._answers, {}
        for answer in (*waiting.values(), self._hello):
            answer.give(None)

    async def _ask(self, kind: Kind, ident: int, items: Sequence[Item], fds: Sequence[int]) -> Frame:
        if self._link is None or not self._link.open:
            raise SandboxDiedError("the warden has ended")
        answer = self._answers[ident, kind] = _Answer()
        await self._link.send(encode(kind, ident, items), fds)
        await answer.event.wait()
        if answer.frame is None:
            raise SandboxDiedError("the jail, or the warden, has ended")
        return answer.frame

    async def start(self, ident: int, items: Sequence[Item], fds: Sequence[int]) -> int:
        """Starts a jail; returns when its agent runs and its own mounts are there.

        Returns 0, or the errno for which its image could not be covered by overlays. Whatever happens, `release` must
        follow.

        Raises:
            StartError: it did not come up; carries the jail tool's own words.
            SandboxDiedError: the warden has ended.
        """
        frame = await self._ask(Kind.START, ident, items, fds)
        if frame.kind != Kind.STARTED:
            words = (frame.value(Tag.TEXT) or b"").rstrip(b"\0").decode(errors="replace").strip()
            raise fault_with(words or os.strerror(frame.errno()), frame.errno(), StartError)
        return frame.errno()

    async def renew(self, ident: int, items: Sequence[Item]) -> None:
        """Makes mounts of a live jail anew; returns when they are there and the old ones gone.

        Raises:
            StartError: they could not be made, and what is there now is unknown.
            SandboxDiedError: the jail or the warden has ended.
        """
        frame = await self._ask(Kind.RENEW, ident, items, ())
        if error := frame.errno():
            raise fault("a sandbox's mounts could not be made anew", error, StartError)

    @asynccontextmanager
    async def reading(self, ident: int, items: Sequence[Item], pipe: int) -> AsyncIterator[None]:
        """Has a jail's workspace written to a pipe, whose other end the caller reads and closes; leaving waits for the
        end of who writes it.

        Args:
            items: whose the workspace is, and the caps.
            pipe: the writing end; closed here.

        Raises:
            SandboxDiedError: the jail or the warden has ended.
            SandboxError: it cannot be read now.
        """
        answer = self._answers[ident, Kind.SEAL] = _Answer()
        try:
            if self._link is None or not self._link.open:
                raise SandboxDiedError("the warden has ended")
            await self._link.send(encode(Kind.SEAL, ident, items), [pipe])
        except BaseException:
            self._answers.pop((ident, Kind.SEAL), None)
            raise
        finally:
            os.close(pipe)
        try:
            yield
        finally:
            with anyio.move_on_after(_READER_TIMEOUT_S, shield=True):
                await answer.event.wait()
        if answer.frame is None:
            raise SandboxDiedError("the sandbox, or the warden, has ended")
        if code := answer.frame.errno():
            raise SandboxError(f"the workspace cannot be read: {os.strerror(code)}")

    async def release(self, ident: int, items: Sequence[Item]) -> bool:
        """Ends a jail; returns when nothing of it is left. False: something stays until the engine's end.

        Where the kernel has no memory for the request it is made again, so that the caller sets the deadline.

        Raises:
            SandboxDiedError: the warden has ended.
        """
        while True:
            try:
                frame = await self._ask(Kind.RELEASE, ident, items, ())
                return frame.errno() == 0
            except SandboxDiedError:
                raise
            except ProtocolError:
                return False  # an answer that makes no sense says nothing is gone
            except SandboxError:
                await anyio.sleep(_SEND_PAUSE_S)

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        self._process = None  # not to be awaited, or killed, by a child
        return [] if self._link is None else self._link.disown()

    async def _wait_for_exit(self, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # an engine that ignores SIGCHLD: the kernel has reaped it for us
            return
        try:
            with anyio.move_on_after(_EXIT_TIMEOUT_S):
                await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)

    async def aclose(self) -> bool:
        """Ends the warden, which first ends everything it holds; True when all of that is gone."""
        if self._link is not None:
            self._link.close()
            self._tell_waiters()
        if self._process is None:
            return True
        if self._process.poll() is None:
            await self._wait_for_exit(self._process.pid)
        if self._process.poll() is None:
            self._process.kill()
            await self._wait_for_exit(self._process.pid)
        return self._process.poll() == 0
