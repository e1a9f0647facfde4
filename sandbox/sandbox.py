"""A live sandbox: commands and files, over the socket of its jail's agent.

Owns: one lease of a jail, with its running commands. Invariant: a path that sandboxed code controls is only ever
resolved inside, by the agent; what comes out is checked again here.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import BinaryIO, Literal, Unpack

import anyio

from sandbox.cgroup import files
from sandbox.cgroup.freezer import Freezer
from sandbox.cgroup.types import CgroupSet
from sandbox.commands.kept import KeptStreams
from sandbox.commands.launch import check_modes, run_frame, send_run
from sandbox.commands.process import Process
from sandbox.commands.rlimits import limit_items
from sandbox.commands.shell import num_busy
from sandbox.commands.usage import begin, measure
from sandbox.errors import ProtocolError, SandboxDiedError, SandboxError, SandboxFrozenError
from sandbox.files.caps import Caps
from sandbox.files.pipes import fetch_tree, send_survey, upload_tar
from sandbox.files.transfer import absolute, get_file, put_file
from sandbox.files.tree import Survey
from sandbox.jail import Jail
from sandbox.layers.bases import Bases
from sandbox.layers.types import Change, Layer
from sandbox.layers.workspace import Workspace
from sandbox.protocol.forks import Owner
from sandbox.protocol.places import MAX_COMMANDS, Places
from sandbox.protocol.requests import Requests
from sandbox.protocol.wire import Frame, Kind, encode
from sandbox.sessions.open import open_session
from sandbox.sessions.session import Session
from sandbox.sessions.types import SessionOptions
from sandbox.types import Command, Outcome, Reason, SandboxSpec, SandboxUsage, Skipped, TarDownload, TarReport

_CLEAN_UP_S = 15.0


class Sandbox:
    """Made by `SandboxHost.acquire` (or `lease`); usable until that context (or lease) ends.

    Several commands may run at once, and background processes of finished ones live on until the sandbox ends.
    """

    def __init__(
        self,
        jail: Jail,
        spec: SandboxSpec,
        env: dict[str, str],
        cgroups: CgroupSet,
        unenforced: Sequence[str],
        kept: KeptStreams,
    ) -> None:
        self.jail = jail
        self.spec = spec
        self.unenforced = tuple(unenforced)
        self._env = env
        self._cgroups = cgroups
        self._limits = limit_items(spec.limits, unenforced)
        self._freezer = Freezer(cgroups.freezer())
        self._running: dict[int, Process] = {}
        self._places = Places(cgroups, MAX_COMMANDS)
        self._kept = kept
        self.num_commands = 0
        """Started so far."""
        self.holds_cgroups = True  # until the host has given them back
        self.workspace_skipped: tuple[Skipped, ...] = ()
        """What of `spec.workspace` was left out: links that lead out of it, FIFOs, sockets and devices."""
        self._died: str | None = None
        self.workspace: Workspace
        self._closed: str | None = None
        begin(cgroups)
        self._link = jail.begin_lease(self._on_frame, self.mark_dead)
        self._requests = Requests(self._link, jail.take_ident, cgroups, self._limits)

    @property
    def why_died(self) -> str | None:
        """Why it ended by itself; None where it was closed, or lives."""
        return self._died

    @property
    def cgroups(self) -> CgroupSet:
        """What holds its commands; the host's to give back."""
        return self._cgroups

    @property
    def alive(self) -> bool:
        """False once the sandbox was closed or has died."""
        return self._died is None and self._closed is None

    def _on_frame(self, frame: Frame, fds: list[int]) -> None:
        process = self._running.get(frame.ident)
        if frame.kind in (Kind.EXITED, Kind.REFUSED):
            self._places.over(frame.ident)
        try:
            if frame.kind == Kind.EXITED and process is not None:
                process.exited(frame.result())
            elif frame.kind == Kind.REFUSED and process is not None:
                process.refused(frame.errno())
            elif self._requests.answered(frame, fds):
                return
        except ProtocolError as error:
            self.jail.mark_dead(f"the sandbox has died ({error})")
        for fd in fds:
            os.close(fd)

    def mark_dead(self, why: str) -> None:
        """Told by the jail: ends every waiter with `SandboxDiedError`; idempotent."""
        if not self.alive:
            return
        self._died = why
        self._link.end()
        self._drop(Reason.SIGNAL, why)

    def _drop(self, reason: Reason, why: str) -> None:
        for process in list(self._running.values()):
            if reason is Reason.KILLED:
                process.mark_killed(reason)
            process.evict(SandboxDiedError(why))
        self._requests.drop(why)
        self._places.close(why)

    def close(self, why: str = "`close` was called") -> None:
        """Ends the agent, and with it every process; running commands get the outcome `killed`. Idempotent.

        Args:
            why: told to who still waits, or uses it later.
        """
        if self._closed is None:  # else the jail may be another tenant's
            self.end_lease(why)
            self.jail.close()

    def end_lease(self, why: str = "its lease is over") -> None:
        """The same, but for the jail and what runs in it: those are the host's to clean. Idempotent."""
        if self._closed is not None:
            return
        self._closed = f"the sandbox was closed ({why})"
        self._link.end()
        self._drop(Reason.KILLED, self._closed)
        self._kept.close()

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        self._closed = "the sandbox is the parent process's"
        self._freezer.disown()
        self._link.end()
        parts: list[Owner] = [self._kept, self._places, self._requests, *self._running.values()]
        return [fd for part in parts for fd in part.disown()]

    def _require_alive(self) -> None:
        if (why := self._closed or self._died) is not None:
            raise SandboxDiedError(why)

    def _require_answering(self) -> None:
        self._require_alive()
        if self._freezer.frozen:
            raise SandboxFrozenError("the sandbox is frozen; thaw it first")

    @property
    def frozen(self) -> bool:
        """True from the call of `freeze` until `thaw`."""
        return self._freezer.frozen

    async def freeze(self) -> None:
        """Stops every process where it is, without a trace in it; returns when all stand still.

        Time goes on: a command whose `timeout_s` is over is killed, its outcome comes as ever, and closing, killing
        and leaving contexts work. What would run inside (`start`, `run`, files) raises `SandboxFrozenError`; what had
        begun waits, but not for ever: `read_file` and `usage` 30 s, `write_file` 60 s, trees their own deadline.
        Frozen already: nothing happens. Cancelled: all go on.

        Raises:
            CapabilityError: the host has no cgroup v2 tree for this sandbox.
            SandboxDiedError: the sandbox has ended.
            SandboxError: a process did not stop within 5 s; all go on.
        """
        self._require_alive()
        await self._freezer.freeze()

    async def thaw(self) -> None:
        """Lets every process go on; does nothing when the sandbox is not frozen.

        Raises:
            SandboxDiedError: the sandbox has ended.
        """
        self._require_alive()
        await self._freezer.thaw()

    def end_freeze(self) -> None:
        """After the end: the next sandbox gets this one's control groups, and must not be born into standing still."""
        self._freezer.end()

    async def run(self, command: Command) -> Outcome:
        """Runs a command to its end. Cancelled, everything that it started is killed first.

        At most 256 run at once: one more waits for its turn, and its `timeout_s` begins then.

        Raises:
            ConfigError: the command does not fit into one request.
            SandboxDiedError: the sandbox ended under it.
            SandboxFrozenError: the sandbox stands still.
        """
        async with self.start(command) as process:
            return await process.wait()

    @asynccontextmanager
    async def start(
        self,
        command: Command,
        fds: Sequence[int] = (),
        *,
        stdin: Literal["bytes", "pipe"] = "bytes",
        output: Literal["collect", "stream"] = "collect",
    ) -> AsyncIterator[Process]:
        """Starts a command, waiting for its turn as in `run`; leaving the context kills what still runs of it.

        Args:
            fds: become the child's 0, 1, 2, 3 …; the caller keeps and closes its own copies. Those of 0-2 that
                are not given are served as in `run`.
            stdin: `bytes` feeds `command.stdin`; with `pipe`, `Process.write_stdin` and `close_stdin` do.
            output: `collect` reads everything; with `stream`, `Process.output` gives the pieces, and the command waits
                while they are not taken. The outcome's head and tail are the same.

        Raises:
            ConfigError: the command does not fit into one request, or what `stdin` or `output` ask for is given twice.
            SandboxDiedError: the sandbox has ended.
        """
        check_modes(command, len(fds), stdin, output)
        self._require_answering()
        ident = self.jail.take_ident()
        leaf = await self._places.take(ident)
        try:
            with files.vanishing():
                stream = output == "stream"
                process = await self._launch(ident, command, fds, leaf, piped=stdin == "pipe", stream=stream)
        except BaseException:
            self._places.over(ident)
            self._places.give_back(leaf)
            raise
        try:
            yield process
        finally:
            if not process.settled:
                with anyio.move_on_after(_CLEAN_UP_S, shield=True), suppress(SandboxError):
                    await process.kill()  # it died, or never began? dead is what was wanted
            self._forget(ident, process)

    def session(self, **options: Unpack[SessionOptions]) -> AbstractAsyncContextManager[Session]:
        """A persistent shell: see `sandbox.sessions.open.open_session`."""
        return open_session(self, self._cgroups, self._kept, **options)

    def _forget(self, ident: int, process: Process) -> None:
        self._running.pop(ident, None)
        self._kept.add(process.take_open_streams())
        if not self.alive:
            self._kept.close()
        self._places.give_back(process.leaf)

    async def _launch(
        self, ident: int, command: Command, fds: Sequence[int], leaf: str | None, *, piped: bool, stream: bool
    ) -> Process:
        frame = run_frame(ident, command, self._env, self._limits, max(3, len(fds)), keeper=leaf is None)
        full = self._cgroups.is_full()
        for other in self._running.values():
            other.alone = False
        alone = not self._running and self._cgroups.idle()
        if alone:
            self._cgroups.reset_peak()
        cpus, kill = self.spec.limits.cpus, lambda: self._ask_kill(ident)
        process = Process(command, self._cgroups, leaf, self.unenforced, kill, cpus=cpus, stream=stream)
        process.alone = alone
        self._running[ident] = process
        self.num_commands += 1
        if full:
            self._places.over(ident)
            process.refused_by_limit(piped=piped)
            return process
        joins = self._cgroups.join_files(leaf) if leaf is not None else ()
        try:
            await send_run(self._link, frame, process, command, fds, joins, piped=piped)
        except BaseException:
            self._running.pop(ident, None)
            for fd in process.take_open_streams():
                os.close(fd)
            raise
        return process

    def _ask_kill(self, ident: int) -> None:
        self._link.post(encode(Kind.KILL, ident))

    async def write_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a regular file, making its parents. The bytes are charged to the sandbox.

        A symbolic link in the last place is refused, not followed.

        Raises:
            TransferError: the sandbox cannot write it (no space, a directory, a link, a read-only place …).
            SandboxDiedError: the sandbox has ended.
        """
        self._require_answering()
        await put_file(self._requests, path, data, mode)

    async def read_file(self, path: str, max_bytes: int) -> bytes:
        """Reads a regular file of at most that many bytes; a link in the last place is not followed.

        A file that shrinks meanwhile comes as far as it goes.

        Raises:
            TransferError: absent, not a regular file, or larger than `max_bytes`.
            SandboxDiedError: the sandbox has ended.
        """
        self._require_answering()
        return await get_file(self._requests, path, max_bytes)

    async def upload_tar(
        self,
        source: bytes | BinaryIO,
        path: str = "/workspace",
        *,
        max_bytes: int | None = None,
        max_entries: int | None = None,
    ) -> TarReport:
        """Unpacks a plain tar of regular files and directories below a directory, made where missing.

        Modes (no setuid, setgid, sticky) and times are kept; all belongs to the sandbox's user and is charged to it.
        A file that exists is replaced, never written through; no link is followed, in `path` neither. A file object
        is read forward from where it stands, in a thread: cancellation waits for a read that has begun, and leaves
        what was unpacked so far. What can seek is checked whole before anything is unpacked.

        Args:
            max_bytes, max_entries: of all files together; None for the sandbox's disk limit and inodes.

        Raises:
            ConfigError: no plain tar, or a member that may not go in (a link, a device, a path that leads out, over
                the caps); names it.
            TransferError: the inside cannot write something (no space, a link on the way …); names it.
            SandboxDiedError: the sandbox has ended.
        """
        self._require_answering()
        caps = Caps(max_bytes, max_entries).within(self.spec.limits)
        return await upload_tar(self._requests, source, absolute(path), caps)

    async def copy(self, bases: Bases, base: Layer) -> None:
        """Copies a base into the workspace, where it cannot lie under it: said by the host, as `fill` is."""
        await bases.copy(self._requests, base, self.spec.limits)

    async def fill(self, found: Survey) -> None:
        """Copies a directory of the host into the workspace: said once, by the host, before anybody has this."""
        await send_survey(self._requests, found)
        self.workspace_skipped = found.skipped

    async def download_tar(
        self, path: str = "/workspace", *, max_bytes: int, max_entries: int | None = None
    ) -> TarDownload:
        """Packs what lies below a directory into a tar of regular files and directories.

        Links, FIFOs, sockets, devices and what cannot be read are listed in `skipped` instead. A file is taken as large
        as it was when it was opened, or less if it shrinks meanwhile; holes come as zeros. No link is followed, in
        `path` neither. Cancelled, the helper inside is dead before this returns.

        Args:
            max_bytes: of the whole tar, headers and padding included.
            max_entries: everything found; None for the sandbox's inodes.

        Raises:
            TransferError: no such directory, or too large: names the first file that does not fit, none of it read.
            SandboxDiedError: the sandbox has ended.
        """
        self._require_answering()
        caps = Caps(max_bytes, max_entries).within(self.spec.limits)
        return await fetch_tree(self._requests, absolute(path), caps)

    async def diff(self, *, max_bytes: int | None = None, max_entries: int | None = None) -> tuple[Change, ...]:
        """What is not as it was in the base; see `Workspace.diff`."""
        self._require_alive()
        caps = Caps(max_bytes, max_entries).within(self.spec.limits)
        return await self.workspace.diff(self, caps, busy=num_busy(self._running.values()) > 0)

    async def seal(self, *, max_bytes: int | None = None, max_entries: int | None = None) -> Layer:
        """The workspace as it is now, as a base for others; see `Workspace.seal`."""
        self._require_alive()
        caps = Caps(max_bytes, max_entries).within(self.spec.limits)
        return await self.workspace.seal(self, caps, busy=num_busy(self._running.values()) > 0)

    async def usage(self) -> SandboxUsage:
        """What the sandbox holds and has used, now; while it is frozen, only what its control groups tell.

        Raises:
            SandboxDiedError: the sandbox has ended.
        """
        self._require_alive()
        space = None if self.frozen else await self._requests.ask_space()
        return measure(self._cgroups, space, num_busy(self._running.values()))
