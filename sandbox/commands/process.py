"""One command that runs in a sandbox, from its start to its outcome.

Owns: the engine's ends of the command's pipes, its leaf cgroup and its deadlines. Invariant: a command leaves with
exactly one outcome or one fault; once it was killed, everything that it started is dead before the outcome is out.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Literal

import anyio

from sandbox.cgroup import files
from sandbox.cgroup.killing import KILL_AGAIN_S, kill_until_empty, try_kill
from sandbox.cgroup.types import CgroupSet, Reading
from sandbox.commands.live import Outlet, StdinPipe, StreamName
from sandbox.commands.outcome import Observed, classify, end_signal, exit_code
from sandbox.commands.shell import Companion
from sandbox.commands.streams import Drain, Feed
from sandbox.errors import ConfigError, SandboxDiedError, SandboxError
from sandbox.protocol.forks import Owner
from sandbox.protocol.wire import Result
from sandbox.types import MIB, Command, Outcome, Output, Reason, Usage

DRAIN_S = 0.05
KILL_TIMEOUT_S = 10.0
_FLOOD_FACTOR = 64
_NOT_STARTED = 126
_CPU_LOOK_S = 0.05
"""Between two looks at a command's CPU time, at least."""

KILLED = Result(int(signal.SIGKILL), 0, 0, 0, 0, 1, 1)
"""What is known of a command that was killed without a report."""

PeakScope = Literal["command", "sandbox", "process"]


class Process:
    """A started command. Made by `Sandbox.start`; `wait` gives its outcome, `kill` ends it early.

    Args:
        kill_inside: asks the agent to kill what the command started.
        unenforced: limits that the host cannot enforce.
        cpus: cores that the sandbox may use at once.
        stream: `output` gives the streams piece by piece, and unread output stops the reading.
    """

    def __init__(
        self,
        command: Command,
        cgroups: CgroupSet,
        leaf: str | None,
        unenforced: tuple[str, ...],
        kill_inside: Callable[[], None],
        *,
        cpus: float,
        stream: bool = False,
    ) -> None:
        self._command = command
        self._cgroups = cgroups
        self.leaf = leaf
        self._unenforced = unenforced
        self._kill_inside = kill_inside
        self._before = cgroups.read(leaf)
        self._drains: dict[int, Drain] = {}
        self._feed: Feed | None = None
        self._stdin: StdinPipe | None = None
        self._outlet = Outlet(self._end_streams) if stream else None
        self._killed_for: Reason | None = None
        self._ended = anyio.Event()
        self._result: Result | None = None
        self._fault: SandboxError | None = None
        self._note = b""
        self._num_refused = 0  # forks that the kernel was not asked for
        self._outcome: Outcome | None = None
        self._finishing = anyio.Lock()
        self.companion: Companion | None = None
        self._started_s = time.monotonic()
        self._ended_s = self._started_s
        self._disowned = False
        self._evicted = False
        self.alone = True
        """No other command ran in this sandbox at the same time (so far)."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(command.timeout_s, self._kill, Reason.TIMEOUT)
        self._give_up: asyncio.TimerHandle | None = None
        self._kill_again: asyncio.TimerHandle | None = None
        self._cpus = cpus
        self._cpu_look: asyncio.TimerHandle | None = None
        if leaf is not None and command.cpu_s is not None:
            self._plan_cpu_look(command.cpu_s)

    def _plan_cpu_look(self, left_s: float) -> None:
        """Looks again when what is left of the CPU time can be used up, and not before."""
        pause_s = max(left_s / min(self._cpus, os.cpu_count() or 1), _CPU_LOOK_S)
        self._cpu_look = asyncio.get_running_loop().call_later(pause_s, self._look_at_cpu)

    def _look_at_cpu(self) -> None:
        if not self.running or self.leaf is None or self._command.cpu_s is None:
            return
        try:
            now_us = files.keyed(f"{self.leaf}/cpu.stat", "usage_usec")
        except OSError as error:
            if not files.gone(error):  # gone, it vanished with the warden, and the command with it
                self._plan_cpu_look(0)
            return
        left_s = self._command.cpu_s - (now_us - (self._before.cpu_us or 0)) / 1e6
        if left_s <= 0:
            self._kill(Reason.TIMEOUT)
        else:
            self._plan_cpu_look(left_s)

    def attach(self, number: int, fd: int) -> None:
        """Collects a stream from its non-blocking read end (owned from now on)."""
        command = self._command
        flood = command.kill_output_bytes
        if flood is None:
            flood = max(MIB, command.output_limit_bytes * _FLOOD_FACTOR)
        stream: StreamName = "stdout" if number == 1 else "stderr"
        on_piece = None if self._outlet is None else partial(self._outlet.put, stream)
        drain = Drain(fd, command.output_limit_bytes, flood, lambda: self._kill(Reason.OUTPUT_LIMIT), on_piece)
        self._drains[number] = drain
        if self._outlet is not None:
            self._outlet.connect(stream, drain)

    def feed(self, fd: int) -> None:
        """Writes the command's stdin to a non-blocking pipe end (owned from now on)."""
        self._feed = Feed(fd, self._command.stdin)

    def open_stdin(self, fd: int) -> None:
        """Lets `write_stdin` write to a non-blocking pipe end (owned from now on)."""
        self._stdin = StdinPipe(fd)

    async def write_stdin(self, data: bytes) -> bool:
        """Writes to the command's stdin, waiting while the pipe is full; concurrent writes take turns.

        Cancelled, a part of the data may have been written.

        Returns:
            False where not all was written, because nobody reads any more: the command has ended or closed it.

        Raises:
            ConfigError: the command was not started with `stdin="pipe"`, or `close_stdin` was called.
        """
        return await self._require_stdin().write(data)

    def close_stdin(self) -> None:
        """Ends the command's stdin: its reader sees the end of file. Idempotent.

        Raises:
            ConfigError: the command was not started with `stdin="pipe"`.
        """
        self._require_stdin().finish()

    def _require_stdin(self) -> StdinPipe:
        if self._stdin is None:
            raise ConfigError("start.stdin", "bytes", "start the command with stdin='pipe' to write to it")
        return self._stdin

    def output(self) -> AsyncIterator[Output]:
        """The pieces of stdout and stderr, in each stream's order, until the command's end.

        Every call gives the same iterator: one consumer at a time, which may stop and go on later. What is not taken
        stays in the pipe, so that the command waits when the pipe is full; at most one piece of each stream is held
        here (after the command's end, what its pipes held). Background children that keep a stream open are not
        waited for longer than in `wait`.

        Raises:
            ConfigError: the command was not started with `output="stream"`; or, while iterating, another consumer
                waits for the next piece.
            SandboxDiedError: while iterating, the sandbox ended under the command.
        """
        if self._outlet is None:
            raise ConfigError("start.output", "collect", "start the command with output='stream' to read it piecewise")
        return self._outlet

    async def _end_streams(self) -> bool:
        """For the outlet: False while the command runs, True when its last pieces are there (or raises its fault)."""
        if self.running:
            return False
        await self.wait()
        return True

    @property
    def running(self) -> bool:
        """Has the foreground process not ended yet, as far as is known?"""
        return not self._ended.is_set()

    @property
    def settled(self) -> bool:
        """Is nothing left to do: not running, and not killed without a look at what survived?"""
        return self._disowned or (not self.running and (self._killed_for is None or self._outcome is not None))

    def exited(self, result: Result) -> None:
        """Told by the sandbox when the agent reports the end; the first report counts."""
        if self.running:
            self._result = result
            self._stop()

    def refused(self, error: int) -> None:
        """Told by the sandbox when the agent could not start it.

        A full process table or memory, or more keepers of background processes than the agent holds (EBUSY), is the
        doing of what runs inside, so it is an outcome; the rest is a fault.
        """
        if not self.running:
            return
        if error in (errno.EAGAIN, errno.ENOMEM, errno.EBUSY):
            self._not_started(error)
        else:
            self.lost(SandboxError(f"the agent refused a command: {os.strerror(error)}"))

    def refused_by_limit(self, *, piped: bool) -> None:
        """Told by the sandbox when its process limit has no room for the command; the agent is not asked."""
        if piped:
            nobody, ours = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.close(nobody)
            self.open_stdin(ours)
        self._num_refused = 1
        self._not_started(errno.EAGAIN)

    def _not_started(self, error: int) -> None:
        self._note = f"rollout: fork: {os.strerror(error)}\n".encode()
        self.exited(Result(_NOT_STARTED << 8, 0, 0, 0, 0, 1, 1))

    def lost(self, fault: SandboxError) -> None:
        """Told by the sandbox when it has ended (closed by its owner, or died)."""
        if self.running:
            self._fault = fault
            self._stop()

    def evict(self, fault: SandboxError) -> None:
        """The same when the lease is over: from now on leaf and counters may be another tenant's."""
        self._evicted = True
        self.lost(fault)

    def _stop(self) -> None:
        self._ended_s = time.monotonic()
        self._stop_timers()
        self._stop_inputs()
        self._ended.set()
        if self._outlet is not None:
            self._outlet.wake()
        if self.companion is not None:
            self.companion.ended()

    def _stop_timers(self) -> None:
        for timer in (self._deadline, self._give_up, self._cpu_look, self._kill_again):
            if timer is not None:
                timer.cancel()

    def _stop_inputs(self) -> None:
        if self._feed is not None:
            self._feed.stop()
        if self._stdin is not None:
            self._stdin.close()

    def mark_killed(self, reason: Reason) -> None:
        """Notes why it will be found dead; the first reason stays."""
        if self._killed_for is None:
            self._killed_for = reason

    def _kill(self, reason: Reason) -> None:
        if not self.running or self._killed_for is not None or self._disowned:
            return
        self._killed_for = reason
        self._kill_inside()
        self._give_up = asyncio.get_running_loop().call_later(KILL_TIMEOUT_S, self._stuck)
        self._kill_leaf()

    def _kill_leaf(self) -> None:
        """Now, or else soon, while the command runs: later the leaf may be another's."""
        if self.leaf is not None and not try_kill(self._cgroups, self.leaf):
            self._kill_again = asyncio.get_running_loop().call_later(KILL_AGAIN_S, self._kill_leaf)

    def _stuck(self) -> None:
        self.lost(SandboxDiedError(f"a killed command did not end in {KILL_TIMEOUT_S} s"))

    async def kill(self) -> None:
        """Kills everything that the command started and waits until it is dead (outcome `killed`).

        Raises:
            SandboxDiedError: the sandbox ended, or the command cannot be killed.
        """
        self._kill(Reason.KILLED)
        await self.wait()

    async def kill_background(self) -> None:
        """Kills what it started and left running, after its end; returns when that is dead where it has a leaf.

        Raises:
            SandboxError: it does not die, or the sandbox has ended.
        """
        self._kill_inside()
        if self.leaf is not None:
            await kill_until_empty(self._cgroups, self.leaf)

    async def wait(self) -> Outcome:
        """The outcome; may be called again. Cancelling it does not end the command (leaving `start` does).

        Raises:
            SandboxDiedError: the sandbox ended under the command.
            SandboxError: our own preparation of the command failed, or what a killed one started does not die; or no
                descriptor is left to read what it used: call it again.
        """
        await self._ended.wait()
        async with self._finishing:
            if self._outcome is None:
                self._outcome = await self._finish()
        return self._outcome

    async def _finish(self) -> Outcome:
        if self._result is not None and self._result.setup_errno:
            raise SandboxError(f"a command could not be prepared: {os.strerror(self._result.setup_errno)}")
        if self._fault is not None and self._killed_for is not Reason.KILLED:
            raise self._fault
        if self._killed_for is not None and self.leaf is not None and self._fault is None:
            await kill_until_empty(self._cgroups, self.leaf, lambda: not self._evicted)
        await self._settle()
        with files.vanishing():
            return self._make_outcome()

    async def _settle(self) -> None:
        """Takes what is already in the pipes, then waits briefly for their end."""
        for drain in self._drains.values():
            drain.read_available()
        if not all(drain.ended.is_set() for drain in self._drains.values()):
            with anyio.move_on_after(DRAIN_S):
                for drain in self._drains.values():
                    await drain.ended.wait()
        if self._outlet is not None:
            self._outlet.finish()

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        self._disowned = True
        self._stop_timers()
        ends: list[Owner] = [*self._drains.values()]
        ends += [end for end in (self._feed, self._stdin, self.companion) if end is not None]
        return [fd for end in ends for fd in end.disown()]

    def take_open_streams(self) -> list[int]:
        """Ends reading; descriptors of streams that background children still hold."""
        self._stop_timers()
        self._stop_inputs()
        return [fd for drain in self._drains.values() if (fd := drain.stop()) is not None]

    def _usage(self, result: Result, after: Reading) -> Usage:
        cpu_us = result.user_us + result.system_us
        if after.cpu_us is not None and self._before.cpu_us is not None:
            cpu_us = max(cpu_us, after.cpu_us - self._before.cpu_us)
        peak = None if self._evicted else self._cgroups.peak_bytes(self.leaf)
        own = self.alone or self._cgroups.peak_is_the_leafs
        scope: PeakScope = "process" if peak is None else ("command" if own else "sandbox")
        return Usage(
            wall_s=self._ended_s - self._started_s,
            cpu_s=cpu_us / 1e6,
            peak_memory_bytes=result.max_rss_bytes if peak is None else peak,
            peak_scope=scope,
            oom_kills=after.oom_kills - self._before.oom_kills,
        )

    def _make_outcome(self) -> Outcome:
        result = self._result
        if result is None:  # the sandbox was closed under it
            result = KILLED
        after = self._before if self._fault is not None or self._evicted else self._cgroups.read(self.leaf)
        usage = self._usage(result, after)
        reason = classify(
            Observed(
                status=result.status,
                killed_for=self._killed_for,
                oom_kills=usage.oom_kills,
                pids_refused=after.pids_refused - self._before.pids_refused + self._num_refused,
                disk_full=result.free_blocks == 0 or result.free_inodes == 0,
                cpu_s=usage.cpu_s,
                cpu_limit_s=self._command.cpu_s,
                unenforced=self._unenforced,
            )
        )
        stdout, stdout_lost = self._drains[1].result() if 1 in self._drains else (b"", 0)
        stderr, stderr_lost = self._drains[2].result() if 2 in self._drains else (b"", 0)
        return Outcome(
            reason=reason,
            exit_code=exit_code(result.status),
            signal=end_signal(result.status),
            stdout=stdout,
            stderr=stderr + self._note,
            stdout_truncated_bytes=stdout_lost,
            stderr_truncated_bytes=stderr_lost,
            usage=usage,
            unenforced=self._unenforced,
        )
