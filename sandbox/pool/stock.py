"""The pool's jails: built, idle, ended, quarantined.

Owns: every jail that is not out on a lease, the builds in flight and the tasks that end jails. Invariant: at most
`max_jails` exist, those that cannot be killed counted; a jail is in one place at a time; what is not `ready` is never
given out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import anyio
import anyio.abc

from sandbox.errors import CapabilityError, ConfigError, SandboxError
from sandbox.jail import Jail, JailKey
from sandbox.pool.backoff import Backoff
from sandbox.pool.builder import Builder
from sandbox.pool.config import PoolConfig
from sandbox.pool.demand import Demand
from sandbox.pool.growth import Build, Growth
from sandbox.pool.quarantine import Quarantine
from sandbox.pool.shelf import Shelf
from sandbox.pool.statistics import Counts
from sandbox.pool.ticket import Ticket
from sandbox.types import Limits


class Stock:
    """Jails for tickets that were admitted.

    Args:
        group: runs the builds and the ends.
        max_jails: of every kind, at once.
        max_building: at once, slow ones not counted.
        strained: is the machine? Then nothing is built but what an acquire waits for.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        builder: Builder,
        config: PoolConfig,
        group: anyio.abc.TaskGroup,
        counts: Counts,
        *,
        max_jails: int,
        max_building: int,
        strained: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._builder = builder
        self._config = config
        self._group = group
        self._counts = counts
        self._max_jails = max_jails
        self._strained = strained
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.shelf = Shelf()
        self.growth: Growth[Ticket] = Growth(max_building)
        self.quarantine = Quarantine()
        self._demand = Demand(config.idle_s)
        self._backoff = Backoff(config.first_pause_s, config.most_pause_s, config.build_retries)
        self._warm = {JailKey(warm.image, warm.jail, warm.user): warm.count for warm in config.warm}
        self._out: dict[JailKey, int] = {}  # jails on their way to a lease, on one, or being reset
        self._failures: dict[JailKey, int] = {}  # of builds in store, in a row
        self._short: dict[JailKey, None] = dict.fromkeys(self._warm)  # may need builds in store
        self._limits: dict[JailKey, Limits] = {}  # the last that were asked for
        self._expiry: asyncio.TimerHandle | None = None
        self._known: dict[int, Jail] = {}
        self.num_ending = 0
        self._closing = False

    @property
    def num_jails(self) -> int:
        """Jails of every kind."""
        return len(self._known) + self.growth.num_building

    # ------------------------------------------------------------------ tickets

    def want(self, ticket: Ticket, pause_s: float = 0.0) -> None:
        """Serves the ticket, at once or when a jail is there.

        Args:
            pause_s: nothing is built for it before that time.
        """
        key = ticket.key
        self._limits[key] = ticket.spec.limits
        self._out[key] = self._out.get(key, 0) + 1
        self._demand.used(key, self._out[key], self._clock())
        jail = self._take_ready(ticket)
        if jail is not None:
            ticket.serve(jail)
            return
        ticket.waited_for_build = ticket.lacking = True
        self.growth.want(key, ticket, paused=pause_s > 0)
        if pause_s > 0:
            self._loop.call_later(pause_s, self._want_again, ticket)

    def leave(self, ticket: Ticket) -> None:
        """The ticket needs no jail any more."""
        ticket.lacking = False
        self.growth.leave(ticket.key, ticket)
        self._in(ticket.key)

    def _want_again(self, ticket: Ticket) -> None:
        self.growth.want_again(ticket.key, ticket)
        self.advance()

    def _in(self, key: JailKey) -> None:
        self._out[key] -= 1
        if not self._out[key]:
            del self._out[key]

    def _take_ready(self, ticket: Ticket) -> Jail | None:
        key = ticket.key
        while (jail := self.shelf.take(key, ticket.suits)) is not None:
            if jail.ready:
                return jail
            self._counts.died += 1
            self._end(key, jail)
        return None

    def take_back(self, key: JailKey, jail: Jail) -> None:
        """A jail that was out, and is `ready`: the next tenant has it, or it is idle."""
        self._in(key)
        self._offer(key, jail)
        self.advance()

    def _offer(self, key: JailKey, jail: Jail) -> None:
        ticket = self.growth.first(key)
        if ticket is not None:
            ticket.lacking = False
            self.growth.leave(key, ticket)
            ticket.serve(jail)
            return
        jail.on_death = partial(self._died, key, jail)
        self.shelf.put(key, jail, self._clock())
        if self._expiry is None:
            self._expiry = self._loop.call_later(self._config.idle_s, self._shrink)

    # ------------------------------------------------------------------ growth

    def advance(self) -> None:
        """Starts what should be built now; cheap where that is nothing."""
        if self._closing:
            return
        while (key := self.growth.next_wanted()) is not None:
            if not self._make_room():
                return
            self._begin(key)
        while self._short and self.growth.may_store and self.num_jails < self._max_jails and not self._strained():
            key = next(iter(self._short))
            if self._num_missing(key) <= 0:
                del self._short[key]
            else:
                self._begin(key)

    def _num_missing(self, key: JailKey) -> int:
        there = self._out.get(key, 0) + self.shelf.count(key) + self.growth.num_builds(key)
        return max(self._warm.get(key, 0), self._demand.peak(key, self._clock())) - there

    def _make_room(self) -> bool:
        """May one more be built? Else the jail that is idle for longest gives way, and its end brings us back."""
        if self.num_jails < self._max_jails:
            return True
        if self.num_ending < self.growth.num_unbuilt and (oldest := self.shelf.take_oldest()) is not None:
            self._counts.shrunk += 1
            self._end(*oldest)
        return False

    def _begin(self, key: JailKey) -> None:
        self._group.start_soon(self._build, self.growth.begin(key))

    async def _build(self, build: Build[Ticket]) -> None:
        key = build.key
        overdue = self._loop.call_later(self._config.slow_build_s, self._overdue, build)
        jail, fault = None, None
        try:
            client = build.client
            limits = self._limits.get(key) if client is None else client.spec.limits
            jail = await self._builder.build(key.image, key.jail, key.user, limits)
            self._known[id(jail)] = jail
        except SandboxError as error:
            fault = error
        finally:
            overdue.cancel()
            ticket = self.growth.end(build)
        if jail is not None:
            self._counts.built += 1
            self._failures.pop(key, None)
            self._offer(key, jail)
            if ticket is not None:
                self.growth.want_again(key, ticket)
        elif fault is not None:
            self._counts.build_failures += 1
            self._failed(key, ticket, fault)
        self.advance()

    def _overdue(self, build: Build[Ticket]) -> None:
        self.growth.overdue(build)
        self.advance()

    def _failed(self, key: JailKey, ticket: Ticket | None, fault: SandboxError) -> None:
        if isinstance(fault, ConfigError | CapabilityError):  # as it would be for everybody
            self._short.pop(key, None)
            while (other := self.growth.first(key)) is not None:
                self._give_up(other, fault)
        elif ticket is not None:
            self._refuse(ticket, fault)
        else:
            self._failures[key] = self._failures.get(key, 0) + 1
            self._short.pop(key, None)
            pause_s = self._backoff.pause_s(min(self._failures[key], max(1, self._config.build_retries)))
            if pause_s is not None:
                self._loop.call_later(pause_s, self._fall_short, key)

    def _refuse(self, ticket: Ticket, fault: SandboxError) -> None:
        ticket.num_failures += 1
        pause_s = self._backoff.pause_s(ticket.num_failures)
        if pause_s is None:
            self._give_up(ticket, fault)
        else:
            self._loop.call_later(pause_s, self._want_again, ticket)

    def want_another(self, ticket: Ticket) -> bool:
        """Its jail could not be leased, for a fault of the host: another one, as `want`; False: give up."""
        ticket.jail = None
        ticket.num_failures += 1
        pause_s = self._backoff.pause_s(ticket.num_failures)
        if pause_s is None:
            return False
        self.want(ticket, pause_s)
        return True

    def _give_up(self, ticket: Ticket, fault: SandboxError) -> None:
        self.leave(ticket)
        ticket.fail(fault)

    def _fall_short(self, key: JailKey) -> None:
        self._short[key] = None
        self.advance()

    # ------------------------------------------------------------------ ends

    def _died(self, key: JailKey, jail: Jail) -> None:
        if self.shelf.remove(jail):
            self._counts.died += 1
            self._end(key, jail)
            self._short[key] = None

    def discard(self, key: JailKey, jail: Jail) -> None:
        """A jail that was out, and cannot be used again: it ends, and another is built in its place."""
        self._put_out(key)
        self._end(key, jail)

    async def destroy(self, key: JailKey, jail: Jail) -> None:
        """The same; returns when it has ended, or is quarantined."""
        self._put_out(key)
        self.num_ending += 1
        await self._destroy(key, jail)

    def _put_out(self, key: JailKey) -> None:
        self._in(key)
        self._short[key] = None

    def _end(self, key: JailKey, jail: Jail) -> None:
        if not self._closing:
            self.num_ending += 1
            self._group.start_soon(self._destroy, key, jail)

    async def _destroy(self, key: JailKey, jail: Jail) -> None:
        gone = False
        try:
            with anyio.move_on_after(self._config.end_timeout_s):
                gone = await self._builder.destroy(jail)
        finally:
            self.num_ending -= 1
        if gone:
            del self._known[id(jail)]
        elif not (self._closing or self._builder.lost.is_set()):
            self.quarantine.add(key, jail)
        self.advance()

    def _shrink(self) -> None:
        now_s, idle_s = self._clock(), self._config.idle_s
        self._expiry = None
        for key, jail in self.shelf.take_expired(now_s, idle_s, self._warm):
            self._counts.shrunk += 1
            self._end(key, jail)
        self._demand.forget(now_s)
        next_s = self.shelf.next_expiry_s(idle_s, self._warm)
        if next_s is not None:
            self._expiry = self._loop.call_later(max(next_s - now_s, 0.001), self._shrink)

    def close(self) -> None:
        """Builds and ends nothing more of itself."""
        self._closing = True
        if self._expiry is not None:
            self._expiry.cancel()

    async def end(self) -> None:
        """Ends every jail, leased ones too; shielded by the caller."""
        self.shelf.take_all()
        with anyio.move_on_after(self._config.end_timeout_s):
            async with anyio.create_task_group() as group:
                for jail in list(self._known.values()):
                    group.start_soon(self._builder.destroy, jail)
