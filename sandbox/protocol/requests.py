"""Questions to the agent that one frame answers, and the helper processes that move files.

Owns: who waits for which answer. Invariant: descriptors that come with an answer go to the one who waits for it or are
closed; a helper is charged to the sandbox like a command, and dead when `helper` is left.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from sandbox.cgroup import files
from sandbox.cgroup.killing import kill_patiently
from sandbox.cgroup.types import CgroupSet
from sandbox.errors import SandboxDiedError, SandboxError
from sandbox.exhaustion import fault
from sandbox.protocol.forks import Owner
from sandbox.protocol.line import Line
from sandbox.protocol.places import MAX_HELPERS, Places
from sandbox.protocol.wire import Frame, Item, Kind, Space, Tag, encode, number

_CLEAN_UP_S = 15.0
_ANSWER_TIMEOUT_S = 30.0

Answer = asyncio.Future[tuple[Frame, list[int]]]
End = asyncio.Future[Frame]


class Requests:
    """The open requests of one sandbox.

    Args:
        take_ident: numbers a request.
        limits: resource limits of every helper.
    """

    def __init__(
        self,
        link: Line,
        take_ident: Callable[[], int],
        cgroups: CgroupSet,
        limits: Sequence[Item],
    ) -> None:
        self._link = link
        self._take_ident = take_ident
        self._cgroups = cgroups
        self._limits = limits
        self._places = Places(cgroups, MAX_HELPERS)
        self._answers: dict[int, Answer] = {}
        self._ends: dict[int, End] = {}
        self._pipes: list[Owner] = []

    def answered(self, frame: Frame, fds: list[int]) -> bool:
        """Hands a frame to the one who waits for it; False where its descriptors are still the caller's."""
        if frame.kind in (Kind.EXITED, Kind.REFUSED):
            self._places.over(frame.ident)
        end = self._ends.get(frame.ident)
        if end is not None and not end.done():
            end.set_result(frame)
        answer = self._answers.get(frame.ident)
        if answer is None or answer.done():
            return False
        if frame.lost:
            words = "no descriptors are left in this process for what the agent passed"
            answer.set_exception(fault(words, errno.EMFILE))
            return False
        answer.set_result((frame, fds))
        return True

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        return [*self._places.disown(), *(fd for pipe in self._pipes for fd in pipe.disown())]

    def drop(self, why: str) -> None:
        """The sandbox has ended: every waiter gets `SandboxDiedError`."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(SandboxDiedError(why))
        for end in self._ends.values():
            if not end.done():
                end.set_exception(SandboxDiedError(why))
        self._places.close(why)

    async def ask(self, kind: Kind, items: Sequence[Item]) -> tuple[Frame, list[int]]:
        """One question and its answer, whose descriptors are the caller's. Cancelled, a late answer is dropped.

        Raises:
            SandboxDiedError: the sandbox has ended.
            SandboxError: there is no answer within 30 s; that clock goes on while the sandbox is frozen.
        """
        ident = self._take_ident()
        answer: Answer = asyncio.get_running_loop().create_future()
        self._answers[ident] = answer
        try:
            with anyio.fail_after(_ANSWER_TIMEOUT_S):
                await self._link.send(encode(kind, ident, items))
                return await answer
        except TimeoutError:
            raise SandboxError(f"the sandbox's agent did not answer within {_ANSWER_TIMEOUT_S} s") from None
        except BaseException:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                for fd in answer.result()[1]:  # it came in the very moment of the cancellation
                    os.close(fd)
            raise
        finally:
            del self._answers[ident]

    async def ask_space(self) -> Space:
        """What is used of the writable mounts; errors as of `ask`."""
        frame, fds = await self.ask(Kind.STAT, [])
        for fd in fds:
            os.close(fd)
        return frame.space()

    @asynccontextmanager
    async def helper(
        self, kind: Kind, items: Sequence[Item], theirs: Sequence[int], ours: Sequence[Owner]
    ) -> AsyncIterator[End]:
        """Runs a helper process inside; leaving kills it where it still runs, and waits until it is dead.

        At most 64 run at once; one more waits for its turn.

        Args:
            theirs: its descriptors; closed here in any case.
            ours: the other ends, which are the caller's to close.

        Yields:
            what tells its end: the agent's frame.

        Raises:
            SandboxDiedError: the sandbox has ended.
            SandboxError: no descriptors are left for it.
        """
        ident = self._take_ident()
        end: End = asyncio.get_running_loop().create_future()
        leaf: str | None = None
        sent = False
        fds = list(theirs)
        self._pipes += ours
        try:
            try:
                leaf = await self._places.take(ident)
                with files.vanishing():
                    for path in self._cgroups.join_files(leaf) if leaf is not None else ():
                        fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
                self._ends[ident] = end
                frame = encode(kind, ident, [*items, number(Tag.STDIO, len(theirs)), *self._limits])
                await self._link.send(frame, fds)
                sent = True
            except OSError as error:
                raise fault("a transfer could not be prepared", error.errno) from error
            finally:
                for fd in fds:
                    os.close(fd)
            yield end
        finally:
            if sent and not end.done() and self._link.open:
                await self._kill(ident, leaf, end)
            self._ends.pop(ident, None)
            self._pipes = [pipe for pipe in self._pipes if pipe not in ours]
            if end.done() and not end.cancelled():
                end.exception()  # seen: a waiter that was cancelled meanwhile does not look any more
            if sent and not end.done():
                self._places.set_aside(ident, leaf)
            else:
                self._places.over(ident)
                self._places.give_back(leaf)

    async def _kill(self, ident: int, leaf: str | None, end: End) -> None:
        self._link.post(encode(Kind.KILL, ident))
        with anyio.move_on_after(_CLEAN_UP_S, shield=True):
            if leaf is not None:
                await kill_patiently(self._cgroups, leaf)
            await asyncio.wait([end])
