"""Sandboxes that all live at once: idle jails of a host, or such that are leased.

Owns them. Invariant: leaving `open_fleet` ends every one of them, however far it has come.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from bench.peers.programs import PROGRAM
from bench.records import CannotMeasure
from sandbox.host import SandboxHost
from sandbox.jail import Jail
from sandbox.sandbox import Sandbox
from sandbox.types import Command, SandboxSpec

_COMMAND = Command(argv=(PROGRAM,))
_ENDING = 64
"""Ended at a time."""


class Fleet:
    """The sandboxes, numbered in the order in which they came up. Made by `open_fleet`.

    Args:
        leased: each is leased with the limits of `spec` from its beginning on; else only while it runs a command.
    """

    def __init__(self, host: SandboxHost, spec: SandboxSpec, *, leased: bool) -> None:
        self._host = host
        self._spec = spec
        self.leased = leased
        self._jails: list[Jail] = []
        self._boxes: list[Sandbox] = []
        self.unenforced: set[str] = set()
        """Limits that were not enforced for a command."""

    def __len__(self) -> int:
        return len(self._boxes if self.leased else self._jails)

    async def add(self) -> None:
        """One more; cancelled, there is none, or one without a lease that `end` ends."""
        spec = self._spec
        jail = await self._host.build(spec.image, spec.jail, spec.user, spec.limits)
        self._jails.append(jail)
        if self.leased:
            self._boxes.append(await self._host.lease(jail, spec))

    async def command(self, index: int) -> float:
        """Runs a command in that sandbox, with a lease around it where it has none; returns the command's seconds.

        Raises:
            CannotMeasure: it did not succeed, or the sandbox was not clean afterwards.
        """
        if self.leased:
            return await self._run(index, self._boxes[index])
        box = await self._host.lease(self._jails[index], self._spec)
        took_s = await self._run(index, box)
        if not await self._host.reset(box):
            raise CannotMeasure(f"sandbox {index:,} is not clean: {self._jails[index].why_unclean}")
        return took_s

    async def _run(self, index: int, box: Sandbox) -> float:
        began = time.perf_counter()
        outcome = await box.run(_COMMAND)
        took_s = time.perf_counter() - began
        if not outcome.ok:
            raise CannotMeasure(f"{PROGRAM} in sandbox {index:,}: {outcome}")
        self.unenforced.update(outcome.unenforced)
        return took_s

    async def end(self) -> None:
        """Ends them all."""
        turns = anyio.CapacityLimiter(_ENDING)

        async def end(jail: Jail) -> None:
            async with turns:
                await self._host.destroy(jail)

        async with anyio.create_task_group() as group:
            while self._jails:
                group.start_soon(end, self._jails.pop())
        self._boxes.clear()


@asynccontextmanager
async def open_fleet(host: SandboxHost, spec: SandboxSpec, *, leased: bool) -> AsyncIterator[Fleet]:
    """A fleet without a sandbox yet."""
    fleet = Fleet(host, spec, leased=leased)
    try:
        yield fleet
    finally:
        with anyio.CancelScope(shield=True):
            await fleet.end()
