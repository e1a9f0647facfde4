"""A live sandbox: commands and files, over the socket of its agent.

Owns: that socket, the running commands, and the output streams that background children keep open. Invariant: a
path that sandboxed code controls is only ever resolved inside, by the agent; what comes out is checked again here.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio

from sandbox.cgroup.types import CgroupSet
from sandbox.errors import (
    ConfigError,
    ProtocolError,
    SandboxDiedError,
    SandboxError,
    SandboxFrozenError,
    TransferError,
)
from sandbox.freezer import Freezer
from sandbox.link import FrameLink
from sandbox.process import Process
from sandbox.rlimits import cpu_items, limit_items
from sandbox.streams import Feed
from sandbox.transfer import absolute, check_put, read_passed
from sandbox.types import Command, Outcome, Reason, SandboxSpec
from sandbox.wire import MAX_FDS, MAX_STRINGS, Frame, Item, Kind, Tag, encode, number, text

MINIMAL_ENV = {
    "HOME": "/workspace",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
_KEPT_STREAMS = 32
_CLEAN_UP_S = 15.0
_PUT_TIMEOUT_S = 60.0


class Sandbox:
    """Made by `SandboxHost.acquire`; usable until that context ends.

    Several commands may run at once, and background processes of finished ones live on until the sandbox ends.
    """

    def __init__(
        self, end: socket.socket, spec: SandboxSpec, env: dict[str, str], cgroups: CgroupSet, unenforced: Sequence[str]
    ) -> None:
        self.spec = spec
        self.unenforced = tuple(unenforced)
        self._env = env
        self._cgroups = cgroups
        self._limits = limit_items(spec.limits, unenforced)
        self._freezer = Freezer(cgroups.freezer())
        self._running: dict[int, Process] = {}
        self._unreported: dict[int, str] = {}  # leaves of commands that were killed while all stood still
        self._answers: dict[int, asyncio.Future[tuple[Frame, list[int]]]] = {}
        self._kept: deque[int] = deque()
        self._late: set[asyncio.Future[None]] = set()
        self._next_ident = 0
        self._died: str | None = None
        self._closed = False
        self._link = FrameLink(end, self._on_frame, self._on_end)

    @property
    def alive(self) -> bool:
        """False once the sandbox was closed or has died."""
        return self._died is None and not self._closed

    # ------------------------------------------------------------------ the agent's socket

    def _on_frame(self, frame: Frame, fds: list[int]) -> None:
        process = self._running.get(frame.ident)
        if frame.kind == Kind.EXITED and process is not None:
            try:
                process.exited(frame.result())
            except ProtocolError as error:
                self._on_end(str(error))
        elif frame.kind == Kind.REFUSED and process is not None:
            process.refused(frame.number(Tag.ERRNO))
        elif frame.kind in (Kind.EXITED, Kind.REFUSED) and frame.ident in self._unreported:
            self._return_unreported(frame.ident)
        elif (answer := self._answers.pop(frame.ident, None)) is not None and not answer.done():
            answer.set_result((frame, fds))
            return
        for fd in fds:
            os.close(fd)

    def _on_end(self, why: str) -> None:
        self.mark_dead(f"the sandbox has died ({why})")

    def mark_dead(self, why: str) -> None:
        """Ends every waiter with `SandboxDiedError`; idempotent."""
        if not self.alive:
            return
        self._died = why
        self._link.close()
        self._drop(Reason.SIGNAL, why)

    def _drop(self, reason: Reason, why: str) -> None:
        for process in list(self._running.values()):
            if reason is Reason.KILLED:
                process.mark_killed(reason)
            process.lost(SandboxDiedError(why))
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(SandboxDiedError(why))

    def close(self) -> None:
        """Ends the agent, and with it every process; running commands get the outcome `killed`. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._link.close()
        self._drop(Reason.KILLED, "the sandbox was closed")
        while self._kept:
            os.close(self._kept.popleft())

    def _require_alive(self) -> None:
        if self._closed:
            raise SandboxDiedError("the sandbox was closed")
        if self._died is not None:
            raise SandboxDiedError(self._died)

    def _require_answering(self) -> None:
        self._require_alive()
        if self._freezer.frozen:
            raise SandboxFrozenError("the sandbox is frozen; thaw it first")

    def _take_ident(self) -> int:
        self._next_ident = (self._next_ident + 1) & 0x7FFFFFFF
        return self._next_ident

    # ------------------------------------------------------------------ standing still

    @property
    def frozen(self) -> bool:
        """True from the call of `freeze` until `thaw`."""
        return self._freezer.frozen

    async def freeze(self) -> None:
        """Stops every process where it is, without a trace in it; returns when all stand still.

        Time goes on: a command whose `timeout_s` is over is killed, its outcome comes as ever, and closing, killing
        and leaving contexts work. What needs an answer from inside (`start`, `run`, files) raises
        `SandboxFrozenError`; a transfer that had begun waits. Frozen already: nothing happens. Cancelled: all go on.

        Raises:
            CapabilityError: the host has no cgroup v2 tree for this sandbox.
            SandboxDiedError: the sandbox has ended.
            SandboxError: a process did not stop within 5 s; all go on.
        """
        self._require_alive()
        await self._freezer.freeze()
        for process in list(self._running.values()):
            process.silenced()

    async def thaw(self) -> None:
        """Lets every process go on; does nothing when the sandbox is not frozen.

        Raises:
            SandboxDiedError: the sandbox has ended.
        """
        self._require_alive()
        await self._freezer.thaw()

    def end_freeze(self) -> None:
        """After the end: the next sandbox gets this one's control groups, and must not be born into standing still."""
        self._freezer.let_go()

    # ------------------------------------------------------------------ commands

    async def run(self, command: Command) -> Outcome:
        """Runs a command to its end. Cancelled, everything that it started is killed first.

        Raises:
            ConfigError: the command does not fit into one request.
            SandboxDiedError: the sandbox ended under it.
            SandboxFrozenError: the sandbox stands still.
        """
        async with self.start(command) as process:
            return await process.wait()

    @asynccontextmanager
    async def start(self, command: Command, fds: Sequence[int] = ()) -> AsyncIterator[Process]:
        """Starts a command; leaving the context kills what is still running of it.

        Args:
            fds: become the child's 0, 1, 2, 3 …; the caller keeps and closes its own copies. Those of 0-2 that
                are not given are served as in `run`.

        Raises:
            ConfigError: the command does not fit into one request.
            SandboxDiedError: the sandbox has ended.
        """
        self._require_answering()
        ident = self._take_ident()
        leaf = self._cgroups.take_leaf()
        try:
            process = await self._launch(ident, command, fds, leaf)
        except BaseException:
            if leaf is not None and self.alive:
                self._cgroups.return_leaf(leaf)
            raise
        try:
            yield process
        finally:
            if not process.settled:
                with anyio.move_on_after(_CLEAN_UP_S, shield=True):
                    await self._kill_quietly(process)
            self._forget(ident, process)

    async def _kill_quietly(self, process: Process) -> None:
        try:
            await process.kill()
        except SandboxError:
            return  # the sandbox died, or the command never began: dead is what was wanted

    def _forget(self, ident: int, process: Process) -> None:
        self._running.pop(ident, None)
        self._kept += process.take_open_streams()
        while len(self._kept) > (_KEPT_STREAMS if self.alive else 0):
            os.close(self._kept.popleft())
        if process.leaf is None or not self.alive:
            return
        if process.unreported:  # the agent may not even have begun it, and will join this leaf once it can
            self._unreported[ident] = process.leaf
        else:
            self._cgroups.return_leaf(process.leaf)

    def _return_unreported(self, ident: int) -> None:
        leaf = self._unreported.pop(ident)
        with suppress(FileNotFoundError):  # it vanished with the warden
            self._cgroups.kill_leaf(leaf)
            self._cgroups.return_leaf(leaf)

    async def _launch(self, ident: int, command: Command, fds: Sequence[int], leaf: str | None) -> Process:
        items = self._run_items(command, max(3, len(fds)), leaf is None)
        try:
            frame = encode(Kind.RUN, ident, items)
        except ProtocolError as error:
            raise ConfigError("command.argv", f"{len(command.argv)} words", str(error)) from None
        for other in self._running.values():
            other.alone = False
        alone = not self._running and self._cgroups.idle()
        if alone:
            self._cgroups.reset_peak()
        process = Process(command, self._cgroups, leaf, self.unenforced, lambda: self._ask_kill(ident))
        process.alone = alone
        self._running[ident] = process
        theirs: list[int] = []
        try:
            attached = self._make_stdio(process, command, fds, theirs)
            for path in self._cgroups.join_files(leaf) if leaf is not None else ():
                theirs.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
                attached.append(theirs[-1])
            if len(attached) > MAX_FDS:
                raise ConfigError("fds", len(fds), f"at most {MAX_FDS - 5} descriptors")
            await self._link.send(frame, attached)
        except BaseException as error:
            self._running.pop(ident, None)
            for fd in process.take_open_streams():
                os.close(fd)
            if isinstance(error, OSError):
                raise SandboxError(f"no descriptors for a command: {error.strerror}") from error
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return process

    def _run_items(self, command: Command, num_stdio: int, keeper: bool) -> list[Item]:
        env = {**self._env, **command.env}
        if len(env) + len(command.argv) >= MAX_STRINGS:
            raise ConfigError(
                "command.argv", f"{len(command.argv)} words", f"at most {MAX_STRINGS} words and variables"
            )
        items = [text(Tag.ARGV, word) for word in command.argv]
        items += [text(Tag.ENV, f"{name}={value}") for name, value in env.items()]
        items += [text(Tag.CWD, command.cwd), number(Tag.STDIO, num_stdio), *self._limits, *cpu_items(command.cpu_s)]
        if keeper:
            items.append(number(Tag.KEEPER, 1))
        return items

    def _make_stdio(self, process: Process, command: Command, fds: Sequence[int], theirs: list[int]) -> list[int]:
        attached = list(fds)
        for index in range(len(fds), 3):
            if index == 0 and not command.stdin:
                child = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            elif index == 0:
                child, ours = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(ours, False)
                process.feed(ours)
            else:
                ours, child = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(ours, False)
                process.attach(index, ours)
            theirs.append(child)
            attached.append(child)
        return attached

    def _ask_kill(self, ident: int) -> bool:
        """Tells the agent; False when it stands still, and only hears of it later."""
        items = [] if self._cgroups.kill_file() else [number(Tag.KEEPER, 1)]
        frame = encode(Kind.KILL, ident, items)
        try:
            if self._link.send_nowait(frame):
                return not self.frozen
        except SandboxDiedError:
            return True  # its end is reported by the link
        task = asyncio.ensure_future(self._send_late(frame))
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        return not self.frozen

    async def _send_late(self, frame: bytes) -> None:
        """Sends once the socket has room; ends with the link at the latest."""
        try:
            await self._link.send(frame)
        except SandboxDiedError:
            return

    # ------------------------------------------------------------------ files

    async def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a regular file, making its parents. The bytes are charged to the sandbox.

        A symbolic link in the last place is refused, not followed.

        Raises:
            TransferError: the sandbox cannot write it (no space, a directory, a link, a read-only place …).
            SandboxDiedError: the sandbox has ended.
        """
        self._require_answering()
        ident = self._take_ident()
        theirs: list[int] = []
        feed: Feed | None = None
        leaf = self._cgroups.take_leaf()
        try:
            child, ours = os.pipe2(os.O_CLOEXEC)
            theirs.append(child)
            os.set_blocking(ours, False)
            for join in self._cgroups.join_files(leaf) if leaf is not None else ():
                theirs.append(os.open(join, os.O_WRONLY | os.O_CLOEXEC))
            items = [text(Tag.PATH, absolute(path)), number(Tag.MODE, mode & 0o7777), *self._limits]
            feed = Feed(ours, data)
            with anyio.fail_after(_PUT_TIMEOUT_S):
                frame, _ = await self._ask(ident, Kind.PUT, items, theirs)
        except BaseException as error:
            self._ask_kill(ident)
            if isinstance(error, TimeoutError):
                raise TransferError(path, f"not written within {_PUT_TIMEOUT_S} s") from None
            raise
        finally:
            for fd in theirs:
                os.close(fd)
            if feed is not None:
                feed.stop()
            if leaf is not None and self.alive:
                self._cgroups.return_leaf(leaf)
        check_put(path, frame)

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        """Reads a regular file of at most that many bytes; a link in the last place is not followed.

        Raises:
            TransferError: absent, not a regular file, or larger than `max_bytes`.
            SandboxDiedError: the sandbox has ended.
        """
        self._require_answering()
        frame, fds = await self._ask(self._take_ident(), Kind.GET, [text(Tag.PATH, absolute(path))], ())
        try:
            return await read_passed(path, frame, fds, max_bytes)
        finally:
            for fd in fds:
                os.close(fd)

    async def _ask(self, ident: int, kind: Kind, items: Sequence[Item], fds: Sequence[int]) -> tuple[Frame, list[int]]:
        answer: asyncio.Future[tuple[Frame, list[int]]] = asyncio.get_running_loop().create_future()
        self._answers[ident] = answer
        try:
            await self._link.send(encode(kind, ident, items), fds)
            return await answer
        finally:
            self._answers.pop(ident, None)
