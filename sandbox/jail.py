"""A jail: namespaces, image and agent of one sandbox, for as long as its first process lives.

Owns: the socket of its agent, and which lease has it. Invariant: it serves one lease at a time, and a new one only
while it is proven clean; the numbers of requests go on from lease to lease, so that no answer is taken for another.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Self

import anyio

from sandbox.errors import ProtocolError, SandboxDiedError
from sandbox.layers.types import Layer
from sandbox.protocol.line import Line
from sandbox.protocol.link import FrameLink
from sandbox.protocol.wire import Frame, Item, Kind, Residue, Tag, encode, number
from sandbox.types import JailName, Limits, SandboxSpec

if TYPE_CHECKING:
    from sandbox.sandbox import Sandbox

_PING_TIMEOUT_S = 2.0
_FRESH_S = 0.2
_CLEAN_TIMEOUT_S = 10.0
"""More than the agent itself waits for what does not die."""


class JailKey(NamedTuple):
    """What makes two jails interchangeable; everything else comes with a lease."""

    image: str
    jail: JailName
    user: int

    @classmethod
    def of(cls, spec: SandboxSpec) -> Self:
        """The key of the jails that can serve that spec."""
        return cls(spec.image, spec.jail, spec.user)


class Identity(NamedTuple):
    """Which jail it is."""

    number: int = 0
    """Unique among the living ones of the engine; the place of its uid in the engine's range."""
    inner_uid: int = 0
    """Its uid as the warden sees it; 0 where the warden changes to none."""
    host_uid: int = 0


class MountSize(NamedTuple):
    """Quota of the writable mounts."""

    disk_bytes: int
    inodes: int

    @classmethod
    def of(cls, limits: Limits) -> Self:
        """That of those limits."""
        return cls(limits.disk_bytes, limits.inodes)


class Jail:
    """Made by `SandboxHost.build`; ended by `SandboxHost.destroy`.

    Args:
        end: the engine's end of the agent's socket; owned from now on.
        env: what the image gives every command.
        why_shared: why siblings share the image's inodes; empty where they do not.
        size: of its writable mounts, which nobody has used.
    """

    def __init__(
        self,
        end: socket.socket,
        key: JailKey,
        *,
        identity: Identity | None = None,
        env: dict[str, str] | None = None,
        why_shared: str = "",
        size: MountSize | None = None,
    ) -> None:
        self.key = key
        self.identity = identity or Identity()
        self.env = env or {}
        self.why_shared = why_shared
        self.size = size or MountSize.of(Limits())
        self.base: Layer | None = None
        """What lies under its workspace."""
        self.pins: list[Layer] = []
        """Layers that lie, or may lie, under its workspaces: the base, and where a renewal failed another one."""
        self.clean = True
        """Is nothing of an earlier lease in it? Kept by whoever leases and resets it."""
        self.why_unclean = ""
        self.num_leases = 0
        self.sandbox: Sandbox | None = None
        """The lease that has it; one that is over stays here until the jail is clean."""
        self.ending: anyio.Event | None = None
        """Set when it has been ended; None while nobody ends it."""
        self.gone = False
        """Is nothing of it left?"""
        self.on_death: Callable[[], None] | None = None
        """Told, on the loop, when it dies unasked; must not block."""
        self._why_died: str | None = None
        self._closed = False
        self._answered_s = 0.0
        self._next_ident = 0
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._line: Line | None = None
        self._link = FrameLink(end, self._on_frame, self._on_end)

    @property
    def number(self) -> int:
        """Unique among the living ones of the engine."""
        return self.identity.number

    @property
    def host_uid(self) -> int:
        """Whom its processes belong to on the host."""
        return self.identity.host_uid

    @property
    def image(self) -> str:
        """As in `SandboxSpec.image`."""
        return self.key.image

    @property
    def tool(self) -> JailName:
        """As in `SandboxSpec.jail`."""
        return self.key.jail

    @property
    def user(self) -> int:
        """As in `SandboxSpec.user`."""
        return self.key.user

    @property
    def alive(self) -> bool:
        """False once it was closed or has died, as far as is known."""
        return self._why_died is None and not self._closed

    @property
    def why_died(self) -> str | None:
        """Why it ended by itself; None where it was closed, or lives."""
        return self._why_died

    @property
    def ready(self) -> bool:
        """Alive, clean and not leased."""
        return self.alive and self.clean and self.sandbox is None

    def take_ident(self) -> int:
        """The number of the next request."""
        self._next_ident = (self._next_ident + 1) & 0x7FFFFFFF
        return self._next_ident

    def begin_lease(self, on_frame: Callable[[Frame, list[int]], None], on_end: Callable[[str], None]) -> Line:
        """From now on frames and the end are told to that lease, until its line ends."""
        self._line = Line(self._link, on_frame, on_end)
        return self._line

    def _on_frame(self, frame: Frame, fds: list[int]) -> None:
        answer = self._answers.get(frame.ident)
        if answer is None and self._line is not None and self._line.open:
            self._line.on_frame(frame, fds)
            return
        for fd in fds:
            os.close(fd)
        if answer is not None and not answer.done():
            answer.set_result(frame)

    def _on_end(self, why: str) -> None:
        self.mark_dead(f"the sandbox has died ({why})")

    def mark_dead(self, why: str) -> None:
        """Ends the lease and every waiter with `SandboxDiedError`; idempotent."""
        if not self.alive:
            return
        self._why_died = why
        self._end_waiters(why)
        if self._line is not None:
            self._line.on_end(why)
        if self.on_death is not None:
            self.on_death()

    def close(self) -> None:
        """Ends the agent, and with it every process; idempotent. The lease is the caller's to end."""
        if self._closed:
            return
        self._closed = True
        self._end_waiters("the sandbox was closed")

    def _end_waiters(self, why: str) -> None:
        self._link.close()
        for answer in self._answers.values():
            _fail(answer, why)

    async def check(self) -> None:
        """Returns when the agent has answered, or had in the last 0.2 s.

        Raises:
            SandboxDiedError: it is dead, or silent for 2 s.
        """
        if not self.alive or time.monotonic() - self._answered_s > _FRESH_S:
            await self.ping()

    async def ping(self) -> None:
        """Returns when the agent answers; one that does not is taken for dead, and ended.

        Raises:
            SandboxDiedError: it is dead, or silent for 2 s.
        """
        try:
            await self._ask(Kind.PING, Kind.PONG, _PING_TIMEOUT_S)
        except SandboxDiedError as error:
            self.mark_dead(str(error))
            raise

    async def end_contents(self) -> Residue:
        """Ends all that a lease has left running or lasting inside, and counts what stays.

        Raises:
            SandboxDiedError: the agent is dead, or silent for 10 s.
            SandboxError: its answer makes no sense, or the kernel refuses the request.
        """
        return (await self._ask(Kind.CLEAN, Kind.CLEANED, _CLEAN_TIMEOUT_S)).residue()

    async def _ask(self, kind: Kind, wanted: Kind, timeout_s: float) -> Frame:
        ident = self.take_ident()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Frame] = loop.create_future()
        self._answers[ident] = answer
        why = f"the sandbox's agent did not answer within {timeout_s} s"
        timer = loop.call_later(timeout_s, _fail, answer, why)
        try:
            if not self._link.send_nowait(encode(kind, ident)):
                with anyio.move_on_after(timeout_s):
                    await self._link.send(encode(kind, ident))
            frame = await answer
        finally:
            timer.cancel()
            del self._answers[ident]
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, also where the waiter was cancelled meanwhile
        if frame.kind != wanted:
            raise ProtocolError(f"the agent answered {kind.name} with kind {frame.kind}")
        self._answered_s = time.monotonic()
        return frame

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        self._closed = True
        return self._link.disown() + ([] if self.sandbox is None else self.sandbox.disown())


def _fail(answer: asyncio.Future[Frame], why: str) -> None:
    if not answer.done():
        answer.set_exception(SandboxDiedError(why))


def explain(residue: Residue) -> str:
    """What of a lease could not be ended; empty for nothing."""
    parts = []
    if residue.num_processes:
        parts.append("processes that do not die")
    if residue.num_ipc:
        parts.append(f"{residue.num_ipc} System V objects that do not go")
    if residue.num_sockets:
        parts.append(f"{residue.num_sockets} sockets")
    if residue.network:
        parts.append("traffic that its network has counted")
    return ", ".join(parts)


def uid_items(who: Identity) -> list[Item]:
    """What makes a child of the warden that jail's user; comes after everything that only root may do."""
    return [number(Tag.IDS, who.inner_uid, who.inner_uid)] if who.inner_uid else []
