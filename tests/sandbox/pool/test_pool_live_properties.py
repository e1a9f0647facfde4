"""Random sequences of acquire, run, write, fork, share, cancel, kill and leave on a real pool, checked against a model.

The model is what each sandbox's workspace must hold: nothing of an earlier tenant, all of its own, and what its parent
had where it was forked. Limits are tried as well. In the end nothing is left: no jail, process, layer or promise.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sandbox.errors import AcquireTimeoutError, SandboxDiedError
from sandbox.health.census import take_census
from sandbox.health.processes import snapshot, with_descendants
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.pool.config import PoolConfig
from sandbox.pool.pool import SandboxPool
from sandbox.sandbox import Sandbox
from sandbox.types import JAIL_NAMES, MIB, Command, Limits, Outcome, Reason, SandboxSpec
from tests.sandbox.pool.fakes import settled
from tests.sandbox.pool.soak_recycling import kill_exactly
from tests.sandbox.waiting import until

LEASES = 4
LIMITS = Limits(memory_bytes=32 * MIB, disk_bytes=2 * MIB, inodes=512, pids=10)
PATIENCE_S = 60.0
MOVES = ("acquire", "acquire", "write", "write", "delete", "look", "fork", "press", "fill", "kill", "leave", "cancel")
steps = st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 1 << 16)), min_size=10, max_size=40)


def shell(script: str) -> Command:
    return Command(argv=("sh", "-c", script), timeout_s=PATIENCE_S)


class Tenant:
    """One lease, and what its workspace must hold."""

    def __init__(self, box: Sandbox, stack: AsyncExitStack, files: dict[str, str]) -> None:
        self.box = box
        self.stack = stack
        self.files = files
        self.killed = False

    async def run(self, script: str) -> Outcome | None:
        """None where it was killed."""
        try:
            return await self.box.run(shell(script))
        except SandboxDiedError:
            assert self.killed, "a sandbox died that nobody has killed"
            return None

    async def look(self) -> None:
        outcome = await self.run('for f in *; do [ -e "$f" ] && read -r v < "$f" && echo "$f=$v"; done; true')
        if outcome is not None and not self.killed:
            assert outcome.ok, outcome
            assert sorted(outcome.stdout.decode().split()) == sorted(f"{k}={v}" for k, v in self.files.items())


class World:
    """The pool and its tenants."""

    def __init__(self, host: SandboxHost, pool: SandboxPool) -> None:
        self.host, self.pool = host, pool
        self.tenants: list[Tenant] = []

    async def step(self, move: str, value: int) -> None:
        """Does one thing, and looks whether it came out as the model says."""
        tenant = self.tenants[value % len(self.tenants)] if self.tenants else None
        if move in ("acquire", "cancel"):
            await self._acquire(value, hurried=move == "cancel")
        elif tenant is None:
            return
        elif move == "leave":
            await self._leave(tenant)
        elif move == "fork" and len(self.tenants) < LEASES and not tenant.killed:
            stack = AsyncExitStack()
            box = await stack.enter_async_context(self.pool.fork(tenant.box))
            await self._enter(box, stack, dict(tenant.files))
        elif move == "kill":
            self._kill(tenant)
        else:
            await self._use(tenant, move, value)

    async def _acquire(self, value: int, *, hurried: bool) -> None:
        """Takes one, where there is a place; hurried, it is cancelled on its way, or soon after."""
        spec = SandboxSpec(jail=JAIL_NAMES[value % len(JAIL_NAMES)], limits=LIMITS)
        stack = AsyncExitStack()
        if len(self.tenants) == LEASES:
            with pytest.raises(AcquireTimeoutError):
                await stack.enter_async_context(self.pool.acquire(spec, deadline_s=self._soon()))
            return
        if hurried:
            with anyio.move_on_after(value % 20 / 1000):
                async with self.pool.acquire(spec) as box:
                    await box.run(shell("touch left; sleep 60 & sleep 60"))
            return
        await self._enter(await stack.enter_async_context(self.pool.acquire(spec)), stack, {})

    @staticmethod
    def _soon() -> float:
        return anyio.current_time() + 0.02

    async def _enter(self, box: Sandbox, stack: AsyncExitStack, files: dict[str, str]) -> None:
        assert all(box is not other.box and box.jail is not other.box.jail for other in self.tenants), "given out twice"
        self.tenants.append(Tenant(box, stack, files))
        await self.tenants[-1].look()

    async def _leave(self, tenant: Tenant) -> None:
        self.tenants.remove(tenant)
        await tenant.stack.aclose()

    def _kill(self, tenant: Tenant) -> None:
        """Kills everything of its sandbox from outside, where that has a uid of its own to be known by."""
        if self.host.shared_uid:
            return
        tenant.killed = True
        warden = self.host._warden.pid
        for info in with_descendants([warden], snapshot()):
            with suppress(OSError):
                if info.pid != warden and os.stat(f"/proc/{info.pid}").st_uid == tenant.box.jail.host_uid:
                    kill_exactly(info)

    async def _use(self, tenant: Tenant, move: str, value: int) -> None:
        name = f"f{value % 7}"
        if move == "write" and await tenant.run(f"echo {value} > {name}"):
            tenant.files[name] = str(value)
        elif move == "delete" and await tenant.run(f"rm -f {name}"):
            tenant.files.pop(name, None)
        elif move == "press":
            outcome = await tenant.run("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do sleep 0.2 & done; wait")
            if outcome is not None and not tenant.killed and "pids" not in tenant.box.unenforced:
                assert outcome.reason is Reason.PIDS, outcome
            await anyio.sleep(0.3)  # those that were begun end
        elif move == "fill":
            script = "head -c 8000000 /dev/zero > full; s=$(stat -c %s full); rm full; exit $((s > 2097152))"
            outcome = await tenant.run(script)
            assert outcome is None or tenant.killed or outcome.exit_code == 0, outcome
        await tenant.look()


async def live(moves: list[tuple[str, int]], state_dir: Path) -> None:
    """A pool's life."""
    config = SandboxConfig(state_dir=str(state_dir))
    async with SandboxHost.start(config) as host:
        warden, roots = host._warden.pid, host.backend.roots
        async with SandboxPool.start(host, PoolConfig(max_leased=LEASES)) as pool:
            world = World(host, pool)
            try:
                for move, value in moves:
                    await world.step(move, value)
                    now = pool.statistics()
                    assert now.leased == len(world.tenants)
                    assert now.leased + now.resetting <= LEASES
                    assert host.num_live <= 2 * LEASES
            finally:
                for tenant in list(world.tenants):
                    await world._leave(tenant)
            await settled(pool)
            now = pool.statistics()
            assert (now.leased, now.promised_memory_bytes, now.promised_pids, now.quarantined) == (0, 0, 0, 0)
            assert host.num_live == now.warm
            await until(lambda: len(with_descendants([warden], snapshot())) <= 1 + 2 * now.warm)
        assert host.num_live == 0
        await until(lambda: len(with_descendants([warden], snapshot())) == 1)
    census = take_census(state_dir)
    assert [*census.processes, *census.mounts, *census.dead_engines] == []
    assert not any(map(os.path.exists, roots))


@given(moves=steps)
@settings(
    max_examples=int(os.environ.get("ROLLOUT_POOL_EXAMPLES", "6")),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@pytest.mark.timeout(600)
def test_whatever_happens_every_sandbox_holds_what_is_its_own(state_dir: Path, moves: list[tuple[str, int]]) -> None:
    anyio.run(live, moves, state_dir, backend="asyncio", backend_options={"use_uvloop": True})
