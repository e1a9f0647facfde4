"""Sandboxes that are ready before they are asked for.

Owns: the queue, the promises and the leases; `Stock` has the jails. Invariant: an acquire ends in exactly one way (a
lease, a fault, its cancellation), a lease ends exactly once and its sandbox is never given out twice; leaving `start`
leaves no jail, task or timer behind.

An acquire passes three stations: the queue (fair, bounded) until the admission promises it a place; the stock, until a
jail of its kind is there, idle or built; and the host, which gives that jail the limits and the workspace of its spec.
What ends a lease happens behind the back of whoever leaves: the jail is reset, or destroyed where it is not proven
clean, and only then its place is free.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Self

import anyio
import anyio.abc

from sandbox.config import default_memory_bytes, default_pids
from sandbox.errors import (
    AcquireTimeoutError,
    CapabilityError,
    ConfigError,
    LayerError,
    PoolFullError,
    SandboxDiedError,
    SandboxError,
    TransferError,
)
from sandbox.layers.bases import Bases
from sandbox.layers.forking import fork
from sandbox.layers.types import Layer
from sandbox.pool.admission import Admission, Budget, free_descriptors
from sandbox.pool.builder import Builder
from sandbox.pool.config import PoolConfig
from sandbox.pool.lease import Lease, Share
from sandbox.pool.pressure import Gauge
from sandbox.pool.queue import FairQueue
from sandbox.pool.statistics import Counts, PoolStatistics
from sandbox.pool.stock import Stock
from sandbox.pool.ticket import Ticket
from sandbox.sandbox import Sandbox
from sandbox.types import SandboxSpec

MAX_PRIORITY = 100
_LOG = logging.getLogger("sandbox.pool")
_LOOK_AGAIN_S = 0.25
_PASSING = ("free memory", "pressure")
"""What holds back and passes without an event of ours."""


class SandboxPool:
    """Gives out sandboxes that are used again. Made by `start`."""

    def __init__(
        self,
        builder: Builder,
        config: PoolConfig,
        budget: Budget,
        group: anyio.abc.TaskGroup,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self._builder = builder
        self._group = group
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._queue: FairQueue[Ticket] = FairQueue(config.max_waiting, config.aging_s)
        gauge = Gauge()
        self._admission = Admission(budget, config, lambda: gauge.look(clock()))
        self._counts = Counts()
        self._stock = Stock(
            builder,
            config,
            group,
            self._counts,
            max_jails=budget.jails,
            max_building=config.max_building or builder.config.max_starting or 4 * (os.cpu_count() or 1),
            strained=lambda: bool(self._admission.strained()),
            clock=clock,
        )
        self._tickets: dict[Ticket, None] = {}  # whose callers wait
        self._leases: dict[Sandbox, Lease] = {}
        self._num_resetting = 0
        self._held_back_by = ""
        self._look_again: asyncio.TimerHandle | None = None
        self._why_closed = ""

    # ------------------------------------------------------------------ life

    @classmethod
    @asynccontextmanager
    async def start(
        cls, host: Builder, config: PoolConfig | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> AsyncIterator[Self]:
        """Yields a pool of that host's sandboxes; leaving ends them all, leased ones too.

        Args:
            clock: seconds, never going back.

        Raises:
            ConfigError: the host, or this process's limit of open files, is too small for `config`.
        """
        config = config or PoolConfig()
        num_open = await anyio.to_thread.run_sync(lambda: len(os.listdir("/proc/self/fd")))
        budget = Budget.of(
            config,
            host.config.memory_bytes or default_memory_bytes(),
            host.config.pids or default_pids(),
            free_descriptors(num_open),
            host.config.max_sandboxes,
        )
        body: BaseException | None = None
        try:
            async with anyio.create_task_group() as group:
                pool = cls(host, config, budget, group, clock)
                try:
                    group.start_soon(pool._watch)
                    pool._stock.advance()
                    yield pool
                except BaseException as error:
                    body = error
                    raise
                finally:
                    await pool._end()
        except BaseExceptionGroup as errors:
            if body is not None and errors.exceptions == (body,):
                raise body from None  # the caller's own: not to be found inside a group
            raise

    async def _watch(self) -> None:
        await self._builder.lost.wait()
        self._close("the host of this pool has ended (its warden died)")

    def _close(self, why: str) -> None:
        """From now on nobody is served, and nothing is begun."""
        self._why_closed = self._why_closed or why
        if self._look_again is not None:
            self._look_again.cancel()
        for ticket in self._tickets:
            ticket.fail(SandboxDiedError(why))
        self._stock.close()

    async def _end(self) -> None:
        self._close("the pool was closed")
        for lease in list(self._leases.values()):
            lease.abandon()
        self._group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._stock.end()

    # ------------------------------------------------------------------ acquire

    @asynccontextmanager
    async def acquire(
        self, spec: SandboxSpec, base: Layer | None = None, *, priority: int = 0, deadline_s: float | None = None
    ) -> AsyncIterator[Sandbox]:
        """A sandbox as fresh as a new one; its commands are killed when the context is left, unless it is shared.

        Cancelled, it leaves the queue, or gives back what it has got.

        Args:
            base: lies under the workspace. A jail that has it already, in the same size, is handed out without new
                mounts.
            priority: higher is served earlier, -100 to 100; within a priority, the first to come is the first to be
                served. One level is worth `aging_s` seconds of waiting.
            deadline_s: absolute, as `time.monotonic()` counts; None: waits for as long as it takes.

        Raises:
            PoolFullError: `max_waiting` wait already.
            AcquireTimeoutError: the deadline is over.
            ConfigError: the spec is wrong, or needs more than the pool gives out in all.
            CapabilityError: the host cannot enforce what the spec insists on, or cannot isolate at all.
            LayerError: the base is gone.
            TransferError: the workspace of the spec could not be copied in.
            StartError: jails do not come up, after the configured retries (`ExhaustedError`: the host has run out of
                something).
            SandboxDiedError: the pool or the warden has ended.
        """
        lease = await self._lease(spec, base, priority, deadline_s)
        try:
            yield lease.sandbox
        finally:
            lease.let_go()

    async def _lease(self, spec: SandboxSpec, base: Layer | None, priority: int, deadline_s: float | None) -> Lease:
        ticket = self._enter(spec, base, priority, deadline_s)
        lease = None
        try:
            self._advance()
            with anyio.move_on_after(None if deadline_s is None else deadline_s - self._clock()):
                while lease is None:
                    await ticket.served()
                    lease = await self._hand_out(ticket)
        except BaseException as error:
            self._withdraw(ticket)
            self._count_end(error)
            raise
        if lease is None:
            words = self._why_waiting(ticket)
            self._withdraw(ticket)
            self._counts.timeouts += 1
            remedy = "give it more time, or let the pool give out or build more at once"
            raise AcquireTimeoutError(self._clock() - ticket.asked_s, words, remedy)
        del self._tickets[ticket]
        self._counts.acquired += 1
        self._counts.warm_hits += not ticket.waited_for_build
        self._counts.waits.add(self._clock() - ticket.asked_s)
        return lease

    def _enter(self, spec: SandboxSpec, base: Layer | None, priority: int, deadline_s: float | None) -> Ticket:
        if self._why_closed:
            raise SandboxDiedError(self._why_closed)
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise ConfigError(
                "priority", priority, f"must be a whole number between -{MAX_PRIORITY} and {MAX_PRIORITY}"
            )
        if deadline_s is not None and not math.isfinite(deadline_s):
            raise ConfigError("deadline_s", deadline_s, "must be a time of time.monotonic(), or None")
        now_s = self._clock()
        ticket = Ticket(spec, now_s, base)
        self._admission.check(ticket.need)
        if not self._queue.push(ticket, priority, now_s):
            self._counts.refused += 1
            remedy = "so many acquires wait already: ask later, or raise it"
            raise PoolFullError("pool.max_waiting", self.config.max_waiting, remedy)
        self._tickets[ticket] = None
        return ticket

    def _count_end(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self._counts.failed += 1
        else:
            self._counts.cancelled += 1

    def _why_waiting(self, ticket: Ticket) -> str:
        if not ticket.admitted:
            return f"held back by {self._held_back_by or 'those before it'}"
        return "no jail of its kind was ready"

    async def _hand_out(self, ticket: Ticket) -> Lease | None:
        """Leases the ticket's jail; None where it cannot be leased, and the ticket waits for another one."""
        jail = ticket.jail
        assert jail is not None
        try:
            waited_s = self._clock() - ticket.asked_s
            sandbox = await self._builder.lease(jail, ticket.spec, ticket.base, waited_s=waited_s)
        except (ConfigError, CapabilityError, LayerError, TransferError):
            raise
        except SandboxError:
            self._lay_down(ticket)
            if self._why_closed or not self._stock.want_another(ticket):
                raise
            self._stock.advance()
            return None
        lease = Lease(ticket, jail, sandbox, self._on_lease_end)
        self._leases[sandbox] = lease
        return lease

    def _lay_down(self, ticket: Ticket) -> None:
        """The jail that the ticket has got is not leased."""
        jail, ticket.jail = ticket.jail, None
        assert jail is not None
        if jail.ready:
            self._stock.take_back(ticket.key, jail)
        else:
            self._stock.discard(ticket.key, jail)

    def _withdraw(self, ticket: Ticket) -> None:
        """The ticket's caller waits no more, and has no lease."""
        del self._tickets[ticket]
        if not ticket.admitted:
            self._queue.discard(ticket)
        else:
            if ticket.jail is not None:
                self._lay_down(ticket)
            elif ticket.lacking:
                self._stock.leave(ticket)
            self._admission.give_back(ticket.need)
        self._advance()

    def _advance(self) -> None:
        """Serves whom it can: said after everything that may have made that possible."""
        if self._why_closed:
            return
        self._held_back_by = ""
        while (ticket := self._queue.first()) is not None:
            self._held_back_by = self._admission.held_back_by(ticket.need)
            if self._held_back_by:
                break
            self._queue.pop()
            self._admission.take(ticket.need)
            ticket.admitted = True
            self._stock.want(ticket)
        if self._held_back_by in _PASSING and self._look_again is None:
            self._look_again = self._loop.call_later(_LOOK_AGAIN_S, self._looked_again)
        self._stock.advance()

    def _looked_again(self) -> None:
        self._look_again = None
        self._advance()

    # ------------------------------------------------------------------ leases

    @property
    def layers(self) -> Bases:
        """The host's layers, to seal, find, keep and release."""
        return self._builder.layers

    def fork(self, parent: Sandbox) -> AbstractAsyncContextManager[Sandbox]:
        """Another sandbox of the pool, from the files of a live one as they are now.

        See `sandbox.layers.forking.fork`, and `acquire` for what it raises and how it ends.
        """
        return fork(self, parent)

    def share(self, sandbox: Sandbox, for_s: float) -> Share:
        """Keeps a leased sandbox for somebody else, who may go on after its acquirer has left.

        Args:
            for_s: it is let go after that time at the latest; `Share.extend` sets another.

        Raises:
            ConfigError: no time that can be waited for.
            SandboxDiedError: it is not on a lease of this pool (any more).
        """
        lease = self._leases.get(sandbox)
        if lease is None:
            raise SandboxDiedError("this sandbox is not on a lease of this pool")
        return Share(lease, for_s)

    def _on_lease_end(self, lease: Lease) -> None:
        del self._leases[lease.sandbox]
        if not self._why_closed:
            self._num_resetting += 1
            self._group.start_soon(self._reset, lease)

    async def _reset(self, lease: Lease) -> None:
        clean = False
        try:
            with anyio.move_on_after(self.config.end_timeout_s):
                clean = await self._builder.reset(lease.sandbox)
        finally:
            self._num_resetting -= 1
        if clean and lease.jail.ready:
            self._counts.recycled += 1
            self._stock.take_back(lease.key, lease.jail)
        else:
            self._counts.unclean += 1
            _LOG.info("a jail is not used again: %s", lease.jail.why_unclean or "its cleaning took too long")
            await self._stock.destroy(lease.key, lease.jail)
        self._admission.give_back(lease.need)
        self._advance()

    # ------------------------------------------------------------------ statistics

    def statistics(self) -> PoolStatistics:
        """A snapshot; costs microseconds."""
        stock, growth = self._stock, self._stock.growth
        return PoolStatistics(
            warm=len(stock.shelf),
            leased=len(self._leases),
            resetting=self._num_resetting,
            building=growth.num_building,
            slow=growth.num_slow,
            ending=stock.num_ending,
            quarantined=len(stock.quarantine),
            waiting=len(self._tickets),
            held_back_by=self._held_back_by,
            promised_memory_bytes=self._admission.memory_bytes,
            promised_pids=self._admission.pids,
            waits=self._counts.waits.snapshot(),
            **self._counts.numbers(),
        )
