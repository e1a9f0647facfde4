"""One persistent shell and the runs in it.

Owns: the conversation with the shell and its holder, and the run of the moment. Invariant: a run is over when the
shell says so over its own socket, or when it has ended, and never by what is in its output; after a run that was ended
early, nothing that it started lives; a shell that cannot be brought back is ended with all that it ever started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import anyio

from sandbox.cgroup import files
from sandbox.cgroup.types import CgroupSet
from sandbox.commands.kept import KeptStreams
from sandbox.commands.process import Process
from sandbox.errors import ConfigError, SandboxDiedError, SandboxError, SandboxFrozenError
from sandbox.protocol.forks import Owner
from sandbox.protocol.wire import Kind
from sandbox.sessions.control import Control
from sandbox.sessions.dialect import NO_PROMPTS, READ_ENV, TERMINAL_SETUP, Report, parse_env, run_lines, script_bytes
from sandbox.sessions.holder import Holder, HolderGoneError
from sandbox.sessions.outcome import End, checked, flood_bytes, make_outcome, make_usage, why_killed
from sandbox.sessions.streams import Kept, Streams
from sandbox.sessions.terminal import Terminal, TypedStreams
from sandbox.sessions.types import SessionState, Size
from sandbox.types import MIB, Command, Outcome, Reason

INTERRUPT_S = 0.5
"""For what runs to end after SIGINT, before SIGKILL."""
_SWEEP_S = 0.25
_NUM_SWEEPS = 4
_CLEAN_UP_S = 15.0
_OURS = Command(argv=("script",), timeout_s=10.0)


class Home(Protocol):
    """What a session asks of its sandbox."""

    unenforced: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """False once it has ended."""

    @property
    def frozen(self) -> bool:
        """Does everything in it stand still?"""


class Session:
    """Made by `Sandbox.session`; usable until that context ends, while `alive`."""

    def __init__(
        self,
        home: Home,
        process: Process,
        holder: Holder,
        cgroups: CgroupSet,
        kept: KeptStreams,
        terminal: Terminal | None,
    ) -> None:
        self._home = home
        self._process = process
        self._holder = holder
        self._cgroups = cgroups
        self._kept = kept
        self._terminal = terminal
        self._control: Control
        self._streams: Streams | TypedStreams | None = None
        self._news = anyio.Event()
        self._report: Report | None = None
        self._flooded = False
        self._number = 0
        self._last_status = 0
        self._question = ""
        self._shadowed = False
        self._spoiled = False
        self._busy = False
        self._ended = False
        self.bash = False
        """Is the shell bash?"""

    @property
    def alive(self) -> bool:
        """False once the shell has ended: by itself, with its sandbox, or because it could not be brought back."""
        return not self._ended and self._process.running

    # ------------------------------------------------------------------ what is told

    def connect(self, control: Control) -> None:
        """The socket of its shell; owned from now on."""
        self._control = control

    async def settle_in(self) -> None:
        """Takes the shell's own words off its terminal, before the first run."""
        self._control.say(TERMINAL_SETUP if self.bash else f"{NO_PROMPTS}; {TERMINAL_SETUP}")
        self._begin()
        try:
            await self._execute(":", _OURS, quiet=True)
        finally:
            self._busy = False
        if self._terminal is not None:
            await self._terminal.read_to_fence()

    def reported(self, report: Report) -> None:
        """Told by the control socket."""
        if report.number > self._number:
            self.spoiled()
        elif report.number == self._number and self._report is None:
            self._report = report
            self._news.set()

    def spoiled(self) -> None:
        """Told by the control socket: the shell's own descriptor was written to."""
        self._spoiled = True
        self._news.set()

    @property
    def idle(self) -> bool:
        """Is no run on?"""
        return not self._busy

    def ended(self) -> None:
        """Told by the process."""
        self._news.set()

    def _flood(self) -> None:
        self._flooded = True
        self._news.set()

    # ------------------------------------------------------------------ runs

    async def run(
        self,
        script: str,
        *,
        timeout_s: float = 30.0,
        stdin: bytes = b"",
        output_limit_bytes: int = 1 * MIB,
        kill_output_bytes: int | None = None,
    ) -> Outcome:
        """Runs a script in the shell to its end; what it changes in the shell stays.

        Its stdin, stdout and stderr are its own (or the terminal); what background jobs write to them later is thrown
        away. When `timeout_s` is over (reason `timeout`), or a stream floods (`output_limit`), what runs gets SIGINT,
        and after 0.5 s everything that this run started gets SIGKILL; the shell and earlier background jobs are
        spared. Where the shell does not come back, the session ends, with everything that it started. It ends as well
        with its shell (`exit`, `exec`, `set -e`): the outcome is then the shell's own. Cancelled, the run is ended in
        the same way first.

        Args:
            script: at most 1 MiB, many lines if need be.
            stdin: on a terminal, it is typed.
            output_limit_bytes, kill_output_bytes: as of `Command`.

        Raises:
            ConfigError: no such script, or another run is not over.
            SandboxDiedError: the session or its sandbox has ended.
            SandboxFrozenError: the sandbox stands still.
            SandboxError: no descriptors are left.
        """
        how = checked(script, timeout_s, stdin, output_limit_bytes, kill_output_bytes)
        self._begin()
        began_s = time.monotonic()
        try:
            with files.vanishing():
                before = self._cgroups.read(self._process.leaf)
            end, kept, cpu_us = await self._execute(script, how)
            wall_s = time.monotonic() - began_s
            with files.vanishing():
                after = self._cgroups.read(self._process.leaf) if self._home.alive else before
                peak = self._cgroups.peak_bytes(self._process.leaf) if self._home.alive else None
            usage = make_usage(before, after, wall_s, cpu_us, peak)
            refused = after.pids_refused - before.pids_refused
            return make_outcome(end, kept, usage, refused, self._home.unenforced)
        finally:
            self._busy = False

    async def state(self) -> SessionState:
        """The shell's directory and exported variables, between two runs: another session can start from them.

        Raises:
            ConfigError: a run is not over.
            SandboxDiedError: the session has ended, maybe over this.
            SandboxError: the variables cannot be read (there is no `cat`, or over 1 MiB of them).
        """
        self._begin()
        last = self._last_status
        try:
            end, kept, _ = await self._execute(READ_ENV, _OURS, quiet=True)
            self._last_status = last
            self._require_alive()
            if end.status or kept[0][1]:
                why = kept[1][0].decode(errors="replace").strip()
                raise SandboxError(f"the session's variables cannot be read: {why or 'too many'}")
            try:
                _, directory = await self._holder.ask(Kind.LOOK)
            except HolderGoneError:
                await self._finish()
                raise SandboxDiedError("the session has ended") from None
            return SessionState(cwd=directory or "/workspace", env=parse_env(kept[0][0]))
        finally:
            self._busy = False

    def resize(self, size: Size) -> None:
        """Gives the terminal another size.

        Raises:
            ConfigError: the session has none.
            SandboxDiedError: the session has ended.
        """
        if self._terminal is None:
            raise ConfigError("session.size", size, "start the session with pty=Size(rows, cols)")
        self._require_alive()
        self._terminal.resize(size)

    def type(self, data: bytes) -> None:
        """Types on the terminal while a run is on; what was not yet taken of earlier typing is cut off.

        Raises:
            ConfigError: the session has no terminal, or no run is on.
        """
        if not isinstance(self._streams, TypedStreams):
            raise ConfigError("session.type", data, "type on a session with a terminal, during a run")
        self._streams.type(data)

    def _require_alive(self) -> None:
        if not self.alive:
            raise SandboxDiedError("the session has ended")

    def _begin(self) -> None:
        if self._busy:
            raise ConfigError("session.run", "a second run", "wait until the one before it is over")
        self._require_alive()
        if self._home.frozen:
            raise SandboxFrozenError("the sandbox is frozen; thaw it first")
        self._busy = True

    async def _execute(self, script: str, how: Command, *, quiet: bool = False) -> tuple[End, tuple[Kept, Kept], int]:
        """One run; also the CPU time that the holder knows of it."""
        self._report, self._flooded = None, False
        data = script_bytes(script, self._last_status, shadowed=self._shadowed)
        bounds = (how.output_limit_bytes, flood_bytes(how), self._flood)
        if self._terminal is None or quiet:
            streams: Streams | TypedStreams = Streams(data, how.stdin, *bounds)
        else:
            streams = TypedStreams(self._terminal, data, how.stdin, *bounds)
        self._streams = streams
        try:
            cpu_us = await self._start(streams, bool(how.stdin), terminal=isinstance(streams, TypedStreams))
            if cpu_us is None:
                return await self._last(Reason.SIGNAL), streams.result(), 0
            end = await self._to_the_end(how.timeout_s)
            await streams.settle()
            return end, streams.result(), max(0, (end.cpu_us or cpu_us) - cpu_us)
        finally:
            if self._home.alive:
                self._kept.add(streams.take_open())
            streams.close()
            self._streams = None

    async def _start(self, streams: Streams | TypedStreams, stdin: bool, *, terminal: bool) -> int | None:
        """Hands the run over; the CPU time used before it, or None where somebody inside has ended the holder."""
        self._number += 1
        try:
            held, _ = await self._holder.ask(Kind.PREPARE, streams.theirs)
        except HolderGoneError:
            await self._finish()
            return None
        streams.begun()
        source, self._question = run_lines(
            held.pid,
            self._number,
            self._last_status,
            bash=self.bash,
            shadowed=self._shadowed,
            stdin=stdin,
            terminal=terminal,
        )
        self._control.say(source, self._question)  # where it has ended already, its process says so
        return held.cpu_us

    async def _to_the_end(self, timeout_s: float) -> End:
        try:
            await self.until(lambda: self._over or self._flooded or self._spoiled, timeout_s)
            killed_for = None if self._over else Reason.OUTPUT_LIMIT if self._flooded else Reason.TIMEOUT
            if self._spoiled and killed_for is not None:
                killed_for = Reason.SIGNAL
            if killed_for is not None:
                await self._stop()
        except BaseException:
            with anyio.move_on_after(_CLEAN_UP_S, shield=True):
                await self._stop()
                if self._report is not None:
                    self._last_status, self._shadowed = self._report.status, self._report.shadowed
                    self._holder.drop()
            raise
        if self._report is None:
            return await self._last(killed_for)
        self._last_status, self._shadowed = self._report.status, self._report.shadowed
        return await self._look(self._report.status << 8, killed_for)

    async def _look(self, status: int, killed_for: Reason | None) -> End:
        """What the holder knows, where it is needed: of a full disk after a failure, of CPU time without cgroups."""
        disk_full, cpu_us = False, None
        try:
            if status or self._process.leaf is None:
                held, _ = await self._holder.ask(Kind.LOOK)
                disk_full, cpu_us = held.free_blocks == 0 or held.free_inodes == 0, held.cpu_us
            self._holder.drop()
        except HolderGoneError:
            await self._finish()
        return End(status, killed_for, disk_full, cpu_us)

    @property
    def _over(self) -> bool:
        return self._report is not None or not self._process.running

    async def until(self, holds: Callable[[], bool], limit_s: float) -> None:
        """Waits for what the shell, its process or a stream brings about, or for the limit."""
        with anyio.move_on_after(limit_s):
            while not holds():
                self._news = anyio.Event()
                await self._news.wait()

    async def _stop(self) -> None:
        """Ends what the run started; ends the session where that does not bring the shell back."""
        try:
            if self._spoiled or self._home.frozen:
                return await self._finish()
            if not self._over:
                await self._holder.ask(Kind.INTERRUPT)
                await self.until(lambda: self._over, INTERRUPT_S)
            for _ in range(_NUM_SWEEPS):
                if not self._process.running:
                    return None
                held, _ = await self._holder.ask(Kind.SWEEP)
                if self._report is not None and held.num_left == 0:
                    return None
                if self._report is None:
                    self._control.say(self._question)  # what was to answer may have been killed
                    await self.until(lambda: self._over, _SWEEP_S / 2)
                if self._report is None:
                    await self._holder.ask(Kind.INTERRUPT)
                    await self.until(lambda: self._over, _SWEEP_S / 2)
        except HolderGoneError:
            pass  # the code that it watched over has got hold of it
        self._report = None
        return await self._finish()

    async def _last(self, killed_for: Reason | None) -> End:
        """The shell has ended: its own end is that of the run."""
        outcome = await self._process.wait()
        await self._finish()
        number = outcome.signal or 0
        status = number if outcome.exit_code is None else outcome.exit_code << 8
        return End(status, killed_for or why_killed(outcome), outcome.reason is Reason.DISK, None, self._spoiled)

    async def _finish(self) -> None:
        """The session is over: kills all that it started and left."""
        if self._ended:
            return
        self._ended = True
        if not self._home.alive:
            return
        if self._process.running:
            await self._process.kill()
        else:
            await self._process.kill_background()

    async def aclose(self) -> None:
        """Ends everything that it started."""
        with anyio.move_on_after(_CLEAN_UP_S, shield=True):
            with suppress(SandboxError):  # the sandbox has ended: dead is what was wanted
                await self._finish()
        self._holder.close()
        self._control.close()

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        parts: list[Owner] = [self._holder, self._control]
        parts += [part for part in (self._terminal, self._streams) if part is not None]
        return [fd for part in parts for fd in part.disown()]
