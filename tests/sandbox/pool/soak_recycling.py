"""Leases recycled by the thousand while agents, jails and wardens are killed, in full: `scripts/soak recycling`.

An era is one engine: a host, a pool, and as many who acquire, run something and leave as the pool has places. Beside
them somebody kills, at random: first processes of sandboxes (agents), whole process trees (jails), everything that a
lease runs; in the end, mostly, the warden itself. After each era nothing of the engine may be left.

Prints a line per era and a summary; exits 1 when something was left or grew, or a lease was not as fresh as new.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec

from sandbox.cgroup.files import kill_tree
from sandbox.errors import SandboxError, StartError
from sandbox.health.census import take_census
from sandbox.health.processes import ProcessInfo, inspect, snapshot, with_descendants
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.pool.config import PoolConfig
from sandbox.pool.pool import SandboxPool
from sandbox.sandbox import Sandbox
from sandbox.types import JAIL_NAMES, MIB, Command, Limits, SandboxSpec

PLACES = 16
LOOK = """
for path in /workspace/* /workspace/.[!.]* /tmp/* /tmp/.[!.]* /dev/shm/*; do [ -e "$path" ] && echo "stale $path"; done
for path in /proc/[0-9]*; do read -r name < $path/comm && [ "$name" = sleep ] && echo "stale $name"; done
true
"""
PROGRAMS = (
    "true",
    "echo left > file; mkdir -p d/e; echo left > /tmp/file",
    "sleep 1000 & echo left > /dev/shm/file",
    "(setsid sh -c 'sleep 1000; true' &) ; true",
    "for i in 1 2 3 4; do sleep 1000 & done; true",
    "head -c 300000 /dev/zero > big",
)
_SIZES = (MIB, MIB, MIB, 2 * MIB)
_CALM_S = 20.0


class Look(msgspec.Struct, frozen=True):
    """What must not grow, after an era."""

    rss_bytes: int
    fds: int
    cgroups: int
    mounts: int
    processes: int
    """Of this process: itself and what descends from it."""

    @classmethod
    def take(cls) -> Look:
        """Looks now."""
        status = Path("/proc/self/status").read_text()
        resident = re.search(r"VmRSS:\s*(\d+) kB", status)
        assert resident is not None
        rows = [line.split() for line in Path("/proc/cgroups").read_text().splitlines()]
        return cls(
            rss_bytes=int(resident[1]) * 1024,
            fds=len(os.listdir("/proc/self/fd")) - 1,
            cgroups=max(int(row[2]) for row in rows[1:]),
            mounts=Path("/proc/self/mountinfo").read_text().count("\n"),
            processes=len(with_descendants([os.getpid()], snapshot())),
        )


class Tally:
    """What has happened so far."""

    def __init__(self) -> None:
        self.leases = 0
        self.recycled = 0
        self.kills: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.looks: list[Look] = []


class Era:
    """One engine's life."""

    def __init__(self, host: SandboxHost, pool: SandboxPool, chance: random.Random, tally: Tally, until: int) -> None:
        self.host, self.pool = host, pool
        self._chance = chance
        self._tally = tally
        self._until = until
        self.out: dict[Sandbox, None] = {}

    async def tenant(self) -> None:
        """Acquires, looks, runs, leaves; again and again."""
        while self._tally.leases < self._until:
            self._tally.leases += 1
            limits = Limits(memory_bytes=32 * MIB, disk_bytes=self._chance.choice(_SIZES), pids=16)
            spec = SandboxSpec(jail=self._chance.choice(JAIL_NAMES), limits=limits)
            try:
                async with self.pool.acquire(spec) as box:
                    self.out[box] = None
                    try:
                        await self._use(box)
                    finally:
                        del self.out[box]
            except SandboxError as error:
                self._tally.faults[type(error).__name__] += 1
                if not self._warden_lives():
                    return

    async def _use(self, box: Sandbox) -> None:
        look = await box.run(Command(argv=("sh", "-c", LOOK)))
        if b"stale" in look.stdout:
            self._tally.wrong.append(f"a lease that was not fresh: {look}")
        await box.run(Command(argv=("sh", "-c", self._chance.choice(PROGRAMS))))

    def _warden_lives(self) -> bool:
        return Path(f"/proc/{self.host._warden.pid}/status").exists() and not self.host._warden_gone

    async def killer(self, pause_s: float) -> None:
        """Kills something every now and then."""
        while True:
            await anyio.sleep(self._chance.uniform(0, 2 * pause_s))
            kind = self._chance.choice(("agent", "tree", "lease"))
            with suppress(ProcessLookupError, OSError, SandboxError):
                self._kill(kind)
                self._tally.kills[kind] += 1

    def _kill(self, kind: str) -> None:
        table = snapshot()
        warden = self.host._warden.pid
        below = sorted({info.pid for info in with_descendants([warden], table)} - {warden})
        first = [pid for pid in below if table[pid].parent == warden]
        if kind == "agent" and first:
            kill_exactly(table[self._chance.choice(first)])
        elif kind == "tree" and below:
            for info in with_descendants([self._chance.choice(below)], table):
                kill_exactly(info)
        elif kind == "lease" and self.out:
            box = self._chance.choice(list(self.out))
            if (path := box.cgroups.kill_file()) is not None:
                kill_tree(os.path.dirname(path))


def kill_exactly(info: ProcessInfo) -> None:
    """Kills that process, and none that has got its number meanwhile."""
    pidfd = os.pidfd_open(info.pid)
    try:
        if (now := inspect(info.pid)) is not None and now.started == info.started:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


async def live_once(state_dir: Path, chance: random.Random, tally: Tally, leases: int, pause_s: float) -> str:
    """An era of that many leases; says how it ended."""
    ending = chance.choice(("closed", "warden killed", "warden killed"))
    config = PoolConfig(max_leased=PLACES, first_pause_s=0.01, build_retries=8)
    until = tally.leases + leases
    with suppress(StartError):  # the warden was killed while the pool was closed
        async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
            async with SandboxPool.start(host, config) as pool, anyio.create_task_group() as group:
                era = Era(host, pool, chance, tally, until)
                group.start_soon(era.killer, pause_s)
                async with anyio.create_task_group() as tenants:
                    for _ in range(PLACES):
                        tenants.start_soon(era.tenant)
                    if ending == "warden killed":
                        await _until(lambda: tally.leases >= until - leases // 10)
                        os.kill(host._warden.pid, 9)
                        tally.kills["warden"] += 1
                group.cancel_scope.cancel()
                tally.recycled += pool.statistics().recycled
    return ending


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await anyio.sleep(0.02)


def left(state_dir: Path) -> list[str]:
    """What dead engines of this state directory have left."""
    census = take_census(state_dir)
    own = [path for path in census.cgroups if path.endswith(f"-{os.getpid()}")]
    return [*census.dead_engines, *census.processes, *census.mounts, *census.directories, *own]


def soak(state_dir: Path, leases: int, per_era: int, seed: int, pause_s: float, tell: Callable[[str], None]) -> Tally:
    """All of it."""
    chance, tally = random.Random(seed), Tally()
    while tally.leases < leases:
        started_s, before = time.monotonic(), tally.leases
        ending = anyio.run(
            live_once, state_dir, chance, tally, min(per_era, leases - before), pause_s,
            backend="asyncio", backend_options={"use_uvloop": True},
        )  # fmt: skip
        deadline_s = time.monotonic() + _CALM_S
        while (found := left(state_dir)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        tally.wrong += [f"left after an era: {item}" for item in found]
        look = Look.take()
        tally.looks.append(look)
        rate = (tally.leases - before) / (time.monotonic() - started_s)
        tell(
            f"{tally.leases} leases ({tally.recycled} recycled, {rate:.0f}/s, {ending}): "
            f"{look.rss_bytes / MIB:.1f} MiB resident, {look.fds} descriptors, {look.cgroups} cgroups, "
            f"{look.mounts} mounts, {look.processes} processes; "
            f"kills {dict(tally.kills)}, faults {dict(tally.faults)}"
        )
    return tally


def growth(looks: list[Look]) -> list[str]:
    """What is larger in the end than after the first eras, beyond what is allowed for."""
    settled, last = looks[min(1, len(looks) - 1)], looks[-1]
    allowed = {"rss_bytes": 16 * MIB, "fds": 0, "cgroups": 400, "mounts": 0, "processes": 0}
    return [
        f"{name} grew from {getattr(settled, name)} to {getattr(last, name)}"
        for name, most in allowed.items()
        if getattr(last, name) > getattr(settled, name) + most
    ]


def main() -> int:
    """Runs the soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leases", type=int, default=20_000)
    parser.add_argument("--per-era", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="default: another one each time")
    arguments = parser.parse_args()
    state_dir = Path(tempfile.mkdtemp(prefix="rollout-recycling-"))
    state_dir.chmod(0o755)
    try:
        tally = soak(
            state_dir, arguments.leases, arguments.per_era, arguments.seed, 0.05, lambda line: print(line, flush=True)
        )
    finally:
        shutil.rmtree(state_dir, ignore_errors=True)
    wrong = [*tally.wrong, *growth(tally.looks)]
    print(
        f"{tally.leases} leases, {tally.recycled} recycled, {sum(tally.kills.values())} kills (seed {arguments.seed}); "
        f"wrong: {'; '.join(wrong[:20]) or 'nothing'}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
