"""One acquire, from its call to the sandbox.

Owns: nothing but its own state. Invariant: it is in exactly one place at a time: the queue, the line of those that lack
a jail, or it has a jail (or a fault) and is with its caller.
"""

from __future__ import annotations

import anyio

from sandbox.jail import Jail, JailKey, MountSize
from sandbox.layers.types import Layer
from sandbox.pool.admission import Need
from sandbox.types import SandboxSpec


class Ticket:
    """What one caller of `SandboxPool.acquire` waits with."""

    def __init__(self, spec: SandboxSpec, asked_s: float, base: Layer | None = None) -> None:
        self.spec = spec
        self.base = base
        self.key = JailKey.of(spec)
        self.need = Need.of(spec)
        self.asked_s = asked_s
        self.admitted = False
        """It has a promise of the admission, which must be given back."""
        self.num_failures = 0
        """Faults of the host on its way so far."""
        self.lacking = False
        """It stands in the stock's line of those that lack a jail."""
        self.waited_for_build = False
        self.jail: Jail | None = None
        self._fault: Exception | None = None
        self._event: anyio.Event | None = None

    def serve(self, jail: Jail) -> None:
        """Its jail is there."""
        assert self.jail is None
        self.jail = jail
        self._wake()

    def fail(self, fault: Exception) -> None:
        """It gets none. (One that has a jail already gets it.)"""
        if self.jail is None and self._fault is None:
            self._fault = fault
            self._wake()

    def _wake(self) -> None:
        if self._event is not None:
            self._event.set()

    def suits(self, jail: Jail) -> bool:
        """Can that jail be leased as it lies, without new mounts?"""
        return jail.base == self.base and jail.size == MountSize.of(self.spec.limits)

    async def served(self) -> Jail:
        """Its jail, as soon as it is there. Cancelled, the ticket must be withdrawn.

        Raises:
            SandboxError: why there is none.
        """
        if self.jail is None and self._fault is None:
            self._event = anyio.Event()
            await self._event.wait()
        if self._fault is not None:
            raise self._fault
        assert self.jail is not None
        return self.jail
