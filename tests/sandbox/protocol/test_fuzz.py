"""Live agents and live wardens under broken frames: they answer, refuse or end, and nothing else happens."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from sandbox.errors import SandboxError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.protocol.wire import Item, Kind, Tag, caps_item, encode, number, rlimit, text
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, SandboxSpec
from tests.sandbox.children import children_of
from tests.sandbox.files.test_hostile_records import stream_of
from tests.sandbox.protocol.fuzzing import scaled, seed
from tests.sandbox.protocol.mutation import mutated
from tests.sandbox.sanitizers import Sanitized, named_native

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(3600 if scaled(1) > 1 else 120)]
REPOSITORY = Path(__file__).resolve().parents[3]
PER_BOX = 300
PER_PING = 50
PING_S = 30.0
LIMITS = Limits(memory_bytes=256 * MIB, pids=64, disk_bytes=16 * MIB)


@pytest.fixture(params=["auto", "none"])
async def host(sanitized: Sanitized, state_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[SandboxHost]:
    sanitized.reports.take()
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend=request.param)
    with named_native(sanitized.native):
        async with SandboxHost.start(config) as host:
            yield host
    assert not any(map(os.path.exists, host.backend.roots))


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """What is passed along: only things that nobody can do harm with."""
    reader, writer = os.pipe()
    fds = [os.open("/dev/null", os.O_RDWR), reader, writer, os.memfd_create("file")]
    yield fds
    for fd in fds:
        os.close(fd)


def refill(fd: int, data: bytes) -> None:
    """Puts other content into a passed file, from its start."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, data, 0)
    os.lseek(fd, 0, os.SEEK_SET)


def frames_of(chance: random.Random, *, keeper: bool) -> list[bytes]:
    ident = chance.randrange(1 << 20, (1 << 20) + 300)
    script = chance.choice(("echo words", "sleep 0.05 & sleep 0.01", "(setsid sleep 9 &)", "cat; exit 3", "sleep 1"))
    limits = [rlimit(7, 64, 64), rlimit(4, 1, 1), rlimit(1, 1 << 20, 1 << 20)]
    kept: list[Item] = [number(Tag.KEEPER, 1)] if keeper else []
    path = chance.choice(("/workspace/x", "/workspace/a/b", "/proc/self/fd/3", "/dev/zero", "/workspace", "/etc/hosts"))
    words = [text(Tag.ARGV, word) for word in chance.choice((("true",), ("sh", "-c", script), ("absent",)))]
    common = [text(Tag.ENV, "PATH=/bin:/usr/bin"), text(Tag.CWD, "/workspace"), number(Tag.STDIO, 3)]
    return [
        encode(Kind.RUN, ident, [*words, *common, *limits, *kept]),
        encode(Kind.PUT, ident, [text(Tag.PATH, path), number(Tag.MODE, 0o644), number(Tag.STDIO, 1), *limits]),
        encode(Kind.GET, ident, [text(Tag.PATH, path)]),
        encode(Kind.KILL, ident),
        encode(Kind.KILL, ident + 1),
        encode(Kind.STAT, ident),
        encode(Kind.UNPACK, ident, [text(Tag.PATH, "/workspace/t"), number(Tag.STDIO, 2), *limits]),
        encode(Kind.PACK, ident, [text(Tag.PATH, path), number(Tag.STDIO, 1), caps_item(1 << 20, 100), *limits]),
    ]


async def attack_agent(box: Sandbox, chance: random.Random, descriptors: list[int], seen: Counter[str]) -> int:
    """Sends broken frames until the sandbox has died of one, or has had enough; returns how many."""
    kinds = [int(kind) for kind in Kind]
    keeper = not box._cgroups.kill_file()
    for index in range(PER_BOX):
        frame = next(mutated(chance, frames_of(chance, keeper=keeper), 1, kinds, shaped=index < PER_BOX - 2))
        count = chance.choice((0, 1, 2, 3, 3, 3, 3, 4, 6, 64))
        refill(descriptors[-1], stream_of(chance))
        try:
            with anyio.fail_after(PING_S):
                await box._link.send(frame[:190_000], [chance.choice(descriptors) for _ in range(count)])
                if index % PER_PING == PER_PING - 1:
                    outcome = await box.run(Command(argv=("true",)))
                    seen[outcome.reason.value] += 1
                    assert (await box.usage()).disk_bytes is not None
        except SandboxError:
            if not box.alive:
                seen["died"] += 1
                return index + 1
            seen["refused"] += 1  # a broken frame had the number of our command, and was answered first
    return PER_BOX


async def test_live_agents_answer_refuse_or_end(
    host: SandboxHost, jail: JailName, sanitized: Sanitized, descriptors: list[int]
) -> None:
    sent = boxes = 0
    seen: Counter[str] = Counter()
    spec = SandboxSpec(jail=jail, limits=LIMITS)
    before = os.listdir("/proc/self/fd")
    while sent < scaled(2000):
        boxes += 1
        what = f"seed {seed()}, sandbox {boxes}"
        try:
            async with host.acquire(spec) as box:
                sent += await attack_agent(box, random.Random(f"{seed()}-{boxes}"), descriptors, seen)
        except TimeoutError:
            pytest.fail(f"{what}: the agent hangs")
        if words := sanitized.reports.take():
            pytest.fail(f"{what}: {words}")
    print(f"seed {seed()}: {sent} frames for {boxes} agents: {dict(seen)}")
    assert host.num_live == 0
    assert sorted(os.listdir("/proc/self/fd")) == sorted(before)
    assert children_of(host._warden.pid) == []
    assert seen["exit"] > 0
    async with host.acquire(spec) as box:
        assert (await box.run(Command(argv=("true",)))).ok


async def test_live_wardens_answer_refuse_or_end(
    sanitized: Sanitized, state_dir: Path, chosen_native: Sanitized | None
) -> None:
    """They run inside a sandbox: what a broken frame makes them write or remove is the sandbox's own."""
    spec = SandboxSpec(image="python", limits=Limits(memory_bytes=1024 * MIB, pids=256, disk_bytes=64 * MIB))
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host, host.acquire(spec) as box:
        native = sanitized.native if "memory" not in box.unenforced else host._native  # a limit on data forbids shadows
        await box.write_file("native", native.read_bytes(), 0o755)
        for name in (
            "sandbox/protocol/wire.py",
            "sandbox/errors.py",
            "tests/sandbox/protocol/mutation.py",
            "tests/sandbox/protocol/fuzz_warden.py",
        ):
            await box.write_file(f"lib/{name}", (REPOSITORY / name).read_bytes())
        argv = (
            "python3",
            "-m",
            "tests.sandbox.protocol.fuzz_warden",
            "/workspace/native",
            str(seed()),
            str(scaled(3000)),
        )
        outcome = await box.run(Command(argv=argv, env={"PYTHONPATH": "/workspace/lib"}, timeout_s=3000))
    assert outcome.ok, (outcome.reason, outcome.stdout.decode(), outcome.stderr.decode())
    report = json.loads(outcome.stdout)
    print(f"seed {seed()}: {report}")
    assert not report["problems"]
    assert {"FAILED", "RELEASED"} <= set(report["answers"])
