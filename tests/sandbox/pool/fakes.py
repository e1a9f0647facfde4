"""A builder whose jails are only numbers, and a loop whose time jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

import anyio

from sandbox.config import SandboxConfig
from sandbox.errors import StartError
from sandbox.jail import JailKey, MountSize
from sandbox.pool.pool import SandboxPool
from sandbox.types import JailName, Limits, SandboxSpec
from tests.sandbox.waiting import until


class _NoWait(selectors.DefaultSelector):
    """Never waits; remembers how long it was asked to."""

    asked_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout is None:
            return ready or super().select(timeout)
        self.asked_s += max(0.0, timeout)
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while there is something to do, and else jumps to the next timer."""

    def __init__(self) -> None:
        self._jumps = _NoWait()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.asked_s


class FakeSandbox:
    """A lease."""

    def __init__(self, jail: FakeJail, spec: SandboxSpec) -> None:
        self.jail = jail
        self.spec = spec


class FakeJail:
    """A jail that is only its state."""

    def __init__(self, number: int, key: JailKey) -> None:
        self.number = number
        self.key = key
        self.on_death: Callable[[], None] | None = None
        self.alive = True
        self.sandbox: FakeSandbox | None = None
        self.clean = True
        self.why_unclean = ""
        self.base: object = None
        self.size = MountSize.of(Limits())
        self.num_leases = 0

    @property
    def ready(self) -> bool:
        return self.alive and self.clean and self.sandbox is None

    def die(self) -> None:
        """Its first process ends."""
        self.alive = False
        if self.on_death is not None:
            self.on_death()


class FakeBuilder:
    """Counts what it is asked for, refuses what must never happen, and does what the test says.

    Attributes:
        on_build, on_lease, on_reset, on_destroy: awaited in each call, before anything has changed; may wait or raise.
            The last two say False for a jail that is not clean, or cannot be ended.
    """

    def __init__(self, **fields: Any) -> None:
        self.config = SandboxConfig(**fields)
        self.jails: dict[int, FakeJail] = {}
        self.built: list[FakeJail] = []
        self.num_building = self.most_building = self.most_jails = self.most_leased = 0
        self.on_build: Callable[[int, JailKey], Any] = nothing
        self.on_lease: Callable[[FakeJail], Any] = nothing
        self.on_reset: Callable[[FakeJail], Any] = nothing
        self.on_destroy: Callable[[FakeJail], Any] = nothing
        self.num_calls = 0
        self.lost = anyio.Event()

    @property
    def leased(self) -> list[FakeJail]:
        return [jail for jail in self.jails.values() if jail.sandbox is not None]

    async def build(self, image: str, jail: JailName, user: int, limits: Limits | None = None) -> FakeJail:
        key, number = JailKey(image, jail, user), self.num_calls
        self.num_calls += 1
        self.num_building += 1
        self.most_building = max(self.most_building, self.num_building)
        self.most_jails = max(self.most_jails, len(self.jails) + self.num_building)
        try:
            await self.on_build(number, key)
        finally:
            self.num_building -= 1
        made = self.jails[number] = FakeJail(number, key)
        self.built.append(made)
        return made

    async def lease(self, jail: FakeJail, spec: SandboxSpec, base: object = None, *, waited_s: float) -> FakeSandbox:
        assert jail.number in self.jails
        assert jail.sandbox is None, "leased twice"
        assert jail.key == JailKey.of(spec), "a jail of another kind"
        assert waited_s >= 0
        await self.on_lease(jail)
        if not jail.ready:
            raise StartError("it is not ready")
        jail.base, jail.size = base, MountSize.of(spec.limits)
        jail.sandbox = FakeSandbox(jail, spec)
        jail.num_leases += 1
        self.most_leased = max(self.most_leased, len(self.leased))
        return jail.sandbox

    async def reset(self, sandbox: FakeSandbox) -> bool:
        jail = sandbox.jail
        assert jail.sandbox is sandbox, "a lease that is over ends again"
        jail.clean = False
        said = await self.on_reset(jail)
        if said is False or not jail.alive:
            return False
        jail.clean, jail.sandbox = True, None
        return True

    async def destroy(self, jail: FakeJail) -> bool:
        if jail.number not in self.jails:
            return True
        if await self.on_destroy(jail) is False:
            return False
        jail.alive = False
        jail.sandbox = None
        self.jails.pop(jail.number, None)
        return True


async def nothing(*_: object) -> None:
    """Takes no time, but lets others run."""
    await anyio.lowlevel.checkpoint()


def takes(seconds: float) -> Callable[..., Any]:
    """Takes that long."""

    async def wait(*_: object) -> None:
        await anyio.sleep(seconds)

    return wait


async def settled(pool: SandboxPool) -> None:
    """Waits until nothing is on its way any more."""
    await until(lambda: is_still(pool), limit_s=600)


def is_still(pool: SandboxPool) -> bool:
    """Is nothing on its way?"""
    now = pool.statistics()
    return now.resetting + now.building + now.ending + now.waiting == 0


async def use(pool: SandboxPool, spec: SandboxSpec, for_s: float = 1.0, **fields: Any) -> None:
    """Has a sandbox for that long."""
    async with pool.acquire(spec, **fields):
        await anyio.sleep(for_s)
