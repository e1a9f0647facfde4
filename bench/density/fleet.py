"""Sandboxes that all live at once.

Owns them. Invariant: leaving `open_fleet` ends every one of them, however far it has come.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from bench.peers.programs import PROGRAM
from bench.records import CannotMeasure
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, SandboxSpec

_COMMAND = Command(argv=(PROGRAM,))
_ENDING = 64
"""Ended at a time."""


class Fleet:
    """The sandboxes, numbered in the order in which they came up. Made by `open_fleet`."""

    def __init__(self, host: SandboxHost, spec: SandboxSpec) -> None:
        self._host = host
        self._spec = spec
        self._boxes: list[tuple[AbstractAsyncContextManager[Sandbox], Sandbox]] = []
        self.unenforced: set[str] = set()
        """Limits that were not enforced for a command."""

    def __len__(self) -> int:
        return len(self._boxes)

    async def add(self) -> None:
        """One more; cancelled, there is none."""
        context = self._host.acquire(self._spec)
        self._boxes.append((context, await context.__aenter__()))

    async def command(self, index: int) -> float:
        """Runs a command in that sandbox; returns its seconds.

        Raises:
            CannotMeasure: it did not succeed.
        """
        began = time.perf_counter()
        outcome = await self._boxes[index][1].run(_COMMAND)
        took_s = time.perf_counter() - began
        if not outcome.ok:
            raise CannotMeasure(f"{PROGRAM} in sandbox {index:,}: {outcome}")
        self.unenforced.update(outcome.unenforced)
        return took_s

    async def end(self) -> None:
        """Ends them all."""
        turns = anyio.CapacityLimiter(_ENDING)

        async def end(context: AbstractAsyncContextManager[Sandbox]) -> None:
            async with turns:
                await context.__aexit__(None, None, None)

        async with anyio.create_task_group() as group:
            while self._boxes:
                group.start_soon(end, self._boxes.pop()[0])


@asynccontextmanager
async def open_fleet(host: SandboxHost, spec: SandboxSpec) -> AsyncIterator[Fleet]:
    """A fleet without a sandbox yet."""
    fleet = Fleet(host, spec)
    try:
        yield fleet
    finally:
        with anyio.CancelScope(shield=True):
            await fleet.end()
