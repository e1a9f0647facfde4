"""A jail serves again only when its agent says that all is gone, and the warden that its mounts are new."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from sandbox import jail as jail_module
from sandbox import leasing as leasing_module
from sandbox.cgroup.absent import AbsentBackend, AbsentSet
from sandbox.errors import SandboxDiedError, StartError
from sandbox.host import SandboxHost
from sandbox.jail import Jail, JailKey
from sandbox.layers.bases import Bases
from sandbox.leasing import Leasing
from sandbox.protocol.warden import Warden
from sandbox.protocol.wire import Item, Kind, Tag, decode, encode
from sandbox.types import Command, JailName, Limits, SandboxSpec
from tests.sandbox.conformance.arena import below, warden_of
from tests.sandbox.waiting import until

pytestmark = pytest.mark.anyio
SPEC = SandboxSpec()
CLEAN, TOUCHED = (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)


class FakeWarden(Warden):
    """Renews at once, as it is told to."""

    def __init__(self) -> None:
        super().__init__(lambda ident: None, lambda: None)
        self.num_renewals = 0
        self.renewing: Exception | None = None

    async def renew(self, ident: int, items: Sequence[Item]) -> None:
        self.num_renewals += 1
        if self.renewing is not None:
            raise self.renewing

    async def release(self, ident: int, items: Sequence[Item]) -> bool:
        return True


class FakeAgent:
    """Answers as it is told to; None: not at all."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self.residue: tuple[int, ...] | None = CLEAN
        self.answers_pings = True
        self.kinds: list[Kind] = []

    async def serve(self) -> None:
        while True:
            await anyio.wait_readable(self._end)
            if not (data := self._end.recv(65_536)):
                return
            frame = decode(data)
            self.kinds.append(Kind(frame.kind))
            if frame.kind == Kind.PING and self.answers_pings:
                self._end.send(encode(Kind.PONG, frame.ident))
            if frame.kind == Kind.CLEAN and self.residue is not None:
                packed = struct.pack(f"<{len(self.residue)}I", *self.residue)
                self._end.send(encode(Kind.CLEANED, frame.ident, [(Tag.RESIDUE, packed)]))


class Scene:
    """A jail with a fake agent, and the leasing over a fake warden."""

    def __init__(self, state_dir: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.theirs = theirs
        self.agent = FakeAgent(theirs)
        self.warden = FakeWarden()
        self.jail = Jail(ours, JailKey.of(SPEC))
        chores = anyio.CapacityLimiter(1)
        self.leasing = Leasing(self.warden, AbsentBackend(), chores, 1.0, Bases(state_dir, self.warden))

    async def lease_and_reset(self, spec: SandboxSpec = SPEC) -> bool:
        return await self.leasing.reset(await self.leasing.lease(self.jail, spec, (), None))


@asynccontextmanager
async def open_scene(state_dir: Path) -> AsyncIterator[Scene]:
    scene = Scene(state_dir)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(scene.agent.serve)
            yield scene
            group.cancel_scope.cancel()
    finally:
        scene.jail.close()
        scene.theirs.close()


async def test_a_clean_answer_makes_a_jail_ready_and_new_mounts_only_where_they_were_touched(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        assert await scene.lease_and_reset()
        assert (scene.jail.ready, scene.warden.num_renewals) == (True, 0)
        scene.agent.residue = TOUCHED
        assert await scene.lease_and_reset()
        assert (scene.jail.ready, scene.warden.num_renewals, scene.jail.num_leases) == (True, 1, 2)


@pytest.mark.parametrize(
    ("residue", "why"),
    [
        ((1, 0, 0, 0, 0), "processes"),
        ((0, 2, 0, 0, 0), "2 System V objects"),
        ((0, 0, 3, 0, 0), "3 sockets"),
        ((0, 0, 0, 1, 0), "network"),
        ((1, 1, 1, 1, 1), "processes that do not die, 1 System V objects"),
        ((0, 0), "well-formed"),
    ],
)
async def test_what_is_left_is_named_and_the_jail_is_not_ready(
    tmp_path: Path, residue: tuple[int, ...], why: str
) -> None:
    async with open_scene(tmp_path) as scene:
        scene.agent.residue = residue
        assert not await scene.lease_and_reset()
        assert why in scene.jail.why_unclean
        assert not scene.jail.ready
        assert scene.warden.num_renewals == 0


async def test_an_agent_that_does_not_answer_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jail_module, "_CLEAN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(jail_module, "_PING_TIMEOUT_S", 0.05)
    async with open_scene(tmp_path) as scene:
        scene.agent.residue = None
        assert not await scene.lease_and_reset()
        assert "did not answer" in scene.jail.why_unclean
    async with open_scene(tmp_path) as scene:
        scene.agent.answers_pings = False
        with pytest.raises(SandboxDiedError, match="did not answer"):
            await scene.leasing.lease(scene.jail, SPEC, (), None)
        assert (scene.jail.num_leases, scene.jail.alive) == (0, False)


async def test_a_jail_whose_mounts_cannot_be_renewed_is_not_ready(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        scene.agent.residue = TOUCHED
        scene.warden.renewing = StartError("no memory")
        assert not await scene.lease_and_reset()
        assert scene.jail.why_unclean == "no memory"
        assert not scene.jail.ready
    async with open_scene(tmp_path) as scene:
        scene.warden.renewing = StartError("no memory")
        with pytest.raises(StartError):
            await scene.leasing.lease(scene.jail, SandboxSpec(limits=Limits(inodes=99)), (), None)
        assert not scene.jail.ready


async def test_control_groups_in_which_somebody_is_left_are_not_given_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leasing_module, "_EMPTY_TIMEOUT_S", 0.02)
    monkeypatch.setattr(AbsentSet, "is_empty", lambda self: False)
    async with open_scene(tmp_path) as scene:
        assert not await scene.lease_and_reset()
        assert "control groups" in scene.jail.why_unclean
        assert scene.jail.sandbox is not None
        assert scene.jail.sandbox.holds_cgroups


async def test_an_agent_that_has_just_answered_is_not_asked_again(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        for _ in range(3):
            assert await scene.lease_and_reset()
        assert scene.agent.kinds == [Kind.PING, *[Kind.CLEAN] * 3]


async def test_an_agent_that_is_gone_is_found_out_before_the_jail_is_handed_out(tmp_path: Path) -> None:
    async with open_scene(tmp_path) as scene:
        told: list[None] = []
        scene.jail.on_death = lambda: told.append(None)
        scene.theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(SandboxDiedError):
            await scene.leasing.lease(scene.jail, SPEC, (), None)
        assert told == [None]
        assert not scene.jail.alive


async def test_agents_live_apart_from_what_they_run_and_stay_where_they_are(host: SandboxHost, jail: JailName) -> None:
    """So a lease moves nobody, idle jails share one memory account, and no agent is out of memory with its tenant."""
    if host.backend.name == "none":
        pytest.skip("environment: this user has no control groups")

    def homes(pids: set[int]) -> set[str]:
        return {line.strip() for pid in pids for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()}

    built = await host.build(jail=jail)
    agents = below(warden_of(host))
    before = homes(agents)
    assert all(any(home.endswith("/agents") for home in before) for _ in agents)
    box = await host.lease(built, SandboxSpec(jail=jail))
    async with box.start(Command(argv=("sleep", "600"), timeout_s=600)) as process:
        inhabitants = Path(process.leaf or "/") / "cgroup.procs"
        await until(lambda: inhabitants.read_text() != "")
        (running,) = map(int, inhabitants.read_text().split())
        assert homes(agents) == before
        assert not any(home.endswith("/agents") for home in homes({running}))
    assert await host.reset(box), built.why_unclean
    assert homes(agents) == before
    assert await host.destroy(built)
