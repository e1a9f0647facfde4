"""An engine to be killed: holds sandboxes in every state that matters, says so, and tells how its waiters ended.

Usage: mortal_engine.py PLAN (a `Plan` as JSON). It prints a `Ready`, an `Answer` for each line that it reads where it
holds the state `answering`, and once every waiter has ended a `Faults`. A line is one JSON object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable

import anyio
import msgspec

from sandbox.cgroup.probe import BackendName
from sandbox.errors import SandboxError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, JailName, Outcome, SandboxSpec
from tests.sandbox.waiting import until

FOREVER_S = 600.0
RABBITS = 16
STORM = (
    "printf 'sh /workspace/rabbit & exit\\n' > rabbit; sleep 600 & "
    f"(for i in $(seq {RABBITS}); do sh rabbit & done); echo on; wait"
)
"""Processes that fork and exit, each a new number every millisecond: a bounded fork storm that no list can follow.

The dead that nobody has reaped yet count as processes: where a busy host lets them pile up to the limit, rabbits fail,
and what waits beside them must not.
"""
TRUE = Command(argv=("true",))


def own_uid_base() -> int:
    """First of the uids for the engines of this session, as root."""
    return 1_500_000 + os.getpid() % 2000 * 2**19


class Plan(msgspec.Struct, kw_only=True):
    """What the engine is to do."""

    state_dir: str
    backend: BackendName
    jail: JailName
    mark: str
    """A number of seconds that nobody else sleeps."""
    states: tuple[str, ...] = ("idle", "busy", "frozen", "storm", "starting")
    uid_base: int = msgspec.field(default_factory=own_uid_base)
    """Nobody else's: a killed engine's uids are free at once, and would be given to any other engine of this host."""


class Ready(msgspec.Struct, kw_only=True):
    """Said when every state is there."""

    pid: int
    warden: int
    slot: int
    roots: tuple[str, ...]
    uids: tuple[int, int]
    """First and last host uid that its sandboxes may have."""
    can_freeze: bool


class Answer(msgspec.Struct):
    """What a sandbox echoed."""

    text: str


class Faults(msgspec.Struct):
    """The name of the exception that each waiter got, by state; or that it got none, and what it got."""

    by_waiter: dict[str, str]


def say(value: msgspec.Struct) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


class Mortal:
    """The states; each method holds one sandbox in it and returns only by a fault."""

    def __init__(self, host: SandboxHost, plan: Plan) -> None:
        self._host = host
        self._spec = SandboxSpec(jail=plan.jail)
        self._sleep = Command(argv=("sleep", plan.mark), timeout_s=FOREVER_S)
        self._leave_sleeping = Command(argv=("sh", "-c", f"(setsid sleep {plan.mark} &) ; sleep {plan.mark} &"))

    async def idle(self, ready: Callable[[], None]) -> Outcome:
        async with self._host.acquire(self._spec) as box:
            ready()
            await until(lambda: not box.alive, FOREVER_S)
            return await box.run(TRUE)

    async def busy(self, ready: Callable[[], None]) -> Outcome:
        async with self._host.acquire(self._spec) as box:
            await box.run(self._leave_sleeping)
            async with box.start(self._sleep) as process:
                ready()
                return await process.wait()

    async def frozen(self, ready: Callable[[], None]) -> Outcome:
        async with self._host.acquire(self._spec) as box:
            await box.run(self._leave_sleeping)
            async with box.start(self._sleep) as process:
                if self._host.backend.name != "none":
                    await box.freeze()
                ready()
                return await process.wait()

    async def storm(self, ready: Callable[[], None]) -> Outcome:
        async with self._host.acquire(self._spec) as box:
            async with box.start(Command(argv=("sh", "-c", STORM), timeout_s=FOREVER_S), output="stream") as process:
                await anext(process.output())
                ready()
                return await process.wait()

    async def starting(self, ready: Callable[[], None]) -> None:
        """Starting, running and closing again and again."""
        while True:
            ready()
            async with self._host.acquire(self._spec) as box:
                await box.run(TRUE)
                await box.run(self._leave_sleeping)

    async def answering(self, ready: Callable[[], None]) -> None:
        async with self._host.acquire(self._spec) as box:
            ready()
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                outcome = await box.run(Command(argv=("echo", "-n", line.strip())))
                say(Answer(outcome.stdout.decode()))


async def main(plan: Plan) -> None:
    config = SandboxConfig(state_dir=plan.state_dir, cgroup_backend=plan.backend, uid_base=plan.uid_base)
    faults: dict[str, str] = {}
    async with SandboxHost.start(config) as host:
        mortal = Mortal(host, plan)

        async def hold(name: str, state: Callable[[Callable[[], None]], Awaitable[object]], ready: anyio.Event) -> None:
            try:
                faults[name] = f"none: {await state(ready.set)}"
            except SandboxError as error:
                faults[name] = type(error).__name__

        async with anyio.create_task_group() as group:
            for state in plan.states:
                ready = anyio.Event()
                group.start_soon(hold, state, getattr(mortal, state), ready)
                await ready.wait()
            uids = range(os.geteuid(), os.geteuid() + 1) if host._claim is None else host._claim.uids
            say(
                Ready(
                    pid=os.getpid(),
                    warden=host._warden.pid,
                    slot=host._slot.number,
                    roots=host.backend.roots,
                    uids=(uids.start, uids.stop - 1),
                    can_freeze=host.backend.name != "none",
                )
            )
        say(Faults(faults))
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, msgspec.json.decode(sys.argv[1], type=Plan), backend_options={"use_uvloop": True})
