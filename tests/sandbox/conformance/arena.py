"""Where a hostile program is let loose: its sandbox, a sibling beside it, and what must still hold afterwards.

Invariant: leaving an arena checks containment whatever happened inside: the sibling answers and kept its file, the
engine starts another sandbox, and nothing of the hostile one is left (processes, mounts, descriptors); leaving the
engine leaves no cgroup, no record and no process.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec

from sandbox.health.census import take_census
from sandbox.health.processes import snapshot, with_descendants
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, Limits, Outcome, Reason, SandboxSpec

PATIENCE_S = 60.0
"""Longest wait for what takes milliseconds on an idle machine; only a failing test waits that long."""
KEPT = b"the sibling's own"


def python(code: str, *words: str, **fields: object) -> Command:
    """A command that runs this program with the interpreter of the image."""
    return msgspec.structs.replace(Command(argv=("python3", "-I", "-S", "-c", code, *words)), **fields)


def shell(script: str, **fields: object) -> Command:
    """A command that runs this script."""
    return msgspec.structs.replace(Command(argv=("sh", "-c", script)), **fields)


async def sh(box: Sandbox, script: str, timeout_s: float = PATIENCE_S) -> Outcome:
    """Runs a script to its end."""
    return await box.run(shell(script, timeout_s=timeout_s))


async def names_inside(box: Sandbox) -> list[bytes]:
    """Names of the processes inside, but for the agent, keepers and the shell that asks."""
    script = "for p in /proc/[0-9]*; do read -r name < $p/comm && echo $name; done 2>/dev/null"
    found = (await sh(box, script)).stdout.split()
    found.remove(b"sh")
    return sorted(name for name in found if not name.startswith(b"rollout-"))


async def assert_names_become(box: Sandbox, *names: bytes) -> None:
    """The processes inside are these, once those that were just forked have their own names."""
    deadline_s = time.monotonic() + PATIENCE_S / 2
    while (found := await names_inside(box)) != sorted(names):
        assert time.monotonic() < deadline_s, found


def assert_limit_reason(outcome: Outcome, limit: str, reason: Reason, ordinary: Iterable[Reason]) -> None:
    """The limit's own reason where this host enforces it; else an ordinary one, and the report that it does not."""
    if limit in outcome.unenforced:
        assert outcome.reason in tuple(ordinary), outcome
    else:
        assert outcome.reason is reason, outcome


async def eventually(
    holds: Callable[[], bool], limit_s: float = 20.0, instead: Callable[[], object] = lambda: "still not so"
) -> None:
    """Waits until something holds; fails after the limit, with what there is instead."""
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, instead()
        await anyio.sleep(0.01)


def below(warden: int) -> set[int]:
    """Processes that descend from a warden."""
    return {info.pid for info in with_descendants([warden], snapshot())} - {warden}


def mounts() -> int:
    """Mounts of this process's namespace."""
    return Path("/proc/self/mountinfo").read_text().count("\n")


def open_fds() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def what_is_open() -> list[str]:
    """Targets of this process's descriptors."""
    return [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def warden_of(host: SandboxHost) -> int:
    """The process that holds an engine's sandboxes."""
    return host._warden.pid


class Arena:
    """One engine with a sibling sandbox. Made by `open_arena`."""

    def __init__(self, host: SandboxHost, spec: SandboxSpec, sibling: Sandbox) -> None:
        self.host = host
        self.spec = spec
        self.sibling = sibling

    @asynccontextmanager
    async def hostile(self, limits: Limits | None = None, **fields: object) -> AsyncIterator[Sandbox]:
        """A sandbox for the hostile program; checks containment when it is left, also where the program killed it."""
        spec = msgspec.structs.replace(self.spec, limits=limits or self.spec.limits, **fields)
        warden = warden_of(self.host)
        before, num_fds = (below(warden), mounts(), self.host.num_live), open_fds()
        async with self.host.acquire(spec) as box:
            yield box
            await self._check_sibling()
        await self._check_sibling()
        await eventually(lambda: open_fds() <= num_fds, instead=what_is_open)
        await eventually(lambda: below(warden) <= before[0])
        assert (mounts(), self.host.num_live) == before[1:]
        async with self.host.acquire(spec) as fresh:
            outcome = await sh(fresh, "ls -A /workspace /tmp /dev/shm && echo fresh")
            assert outcome.stdout.split() == [b"/dev/shm:", b"/tmp:", b"/workspace:", b"fresh"], outcome

    async def _check_sibling(self) -> None:
        outcome = await sh(self.sibling, "cat kept")
        assert outcome.reason is Reason.EXIT, outcome
        assert outcome.stdout == KEPT, outcome


@asynccontextmanager
async def open_arena(config: SandboxConfig, spec: SandboxSpec) -> AsyncIterator[Arena]:
    """An engine and a sibling; afterwards not even the engine has left anything."""
    num_fds, num_mounts = open_fds(), mounts()
    async with SandboxHost.start(config) as host:
        async with host.acquire(spec) as sibling:
            await sibling.write_file("kept", KEPT)
            yield Arena(host, spec, sibling)
        roots, warden = host.backend.roots, warden_of(host)
    assert not any(map(os.path.exists, roots))
    assert warden not in snapshot()
    assert mounts() == num_mounts
    await eventually(lambda: open_fds() <= num_fds, instead=what_is_open)
    state_dir = Path(config.state_dir or "/")
    await eventually(lambda: leftovers(state_dir) == [], instead=lambda: leftovers(state_dir))


def leftovers(state_dir: Path) -> list[str]:
    """What engines of this state directory left; not cgroups, of which a census sees the whole host's."""
    census = take_census(state_dir)
    return [*census.processes, *census.dead_engines, *census.mounts, *census.directories]
