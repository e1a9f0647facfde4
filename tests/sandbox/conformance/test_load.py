"""Many at once: they queue, all are served, the engine stays responsive, and one that hangs holds nobody up."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import msgspec
import pytest

from sandbox.errors import StartError
from sandbox.estate.audit import LOG_NAME, Lease
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import JAIL_NAMES, MIB, Command, JailName, Limits, Outcome, SandboxSpec
from tests.sandbox.conformance.arena import PATIENCE_S, Arena, open_arena, sh
from tests.sandbox.conformance.measure import loop_lag

pytestmark = pytest.mark.anyio

SMALL = Limits(memory_bytes=32 * MIB, disk_bytes=MIB, pids=12)
LAG_P99_S = 0.05


@pytest.fixture
def stuck_tool(state_dir: Path) -> Iterator[Path]:
    """A jail tool that never builds anything."""
    path = state_dir / "stuck-tool"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)
    yield path
    path.unlink()


def with_stuck(config: SandboxConfig, jail: JailName, tool: Path) -> SandboxConfig:
    """That jail hangs."""
    return msgspec.structs.replace(config, **{"bwrap" if jail == "bubblewrap" else "nsjail": str(tool)})


async def test_one_stuck_start_and_a_hundred_others(
    config: SandboxConfig, spec: SandboxSpec, jail: JailName, stuck_tool: Path
) -> None:
    hangs = next(name for name in JAIL_NAMES if name != jail)
    spec = msgspec.structs.replace(spec, limits=SMALL)
    outcomes: list[Outcome] = []

    async def one() -> None:
        async with arena.host.acquire(spec) as box:
            outcomes.append(await sh(box, "true", 4 * PATIENCE_S))

    async def stuck() -> None:
        async with arena.host.acquire(msgspec.structs.replace(spec, jail=hangs)):
            raise AssertionError("it started")

    patient = msgspec.structs.replace(with_stuck(config, hangs, stuck_tool), start_timeout_s=600.0)
    async with open_arena(patient, spec) as arena, anyio.create_task_group() as group:
        alone_s = min([await start_time_s(arena) for _ in range(3)])
        group.start_soon(stuck)
        await anyio.sleep(0.1)
        async with loop_lag() as lag:
            async with anyio.create_task_group() as others:
                for _ in range(100):
                    others.start_soon(one)
        group.cancel_scope.cancel()
    assert [outcome.ok for outcome in outcomes] == [True] * 100
    # Where a single start takes longer than that (a machine in emulation), the loop may be late by a few, not by all.
    assert lag.excess_p99_s < (LAG_P99_S if alone_s < LAG_P99_S else 4 * alone_s)


async def start_time_s(arena: Arena) -> float:
    """How long one start takes while nothing else happens."""
    started_s = time.monotonic()
    async with arena.host.acquire(arena.spec):
        return time.monotonic() - started_s


async def test_a_stuck_start_ends_at_its_deadline_with_a_typed_fault(
    config: SandboxConfig, spec: SandboxSpec, jail: JailName, stuck_tool: Path
) -> None:
    hasty = msgspec.structs.replace(with_stuck(config, jail, stuck_tool), start_timeout_s=0.5)
    async with SandboxHost.start(hasty) as host:
        with pytest.raises(StartError, match=r"not ready after 0\.5 s"):
            async with host.acquire(spec):
                pass
        assert host.num_live == 0


class Waits(logging.Handler):
    """Keeps what the audit says about waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: list[Lease] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.leases.append(msgspec.json.decode(record.getMessage(), type=Lease))


@pytest.fixture
def waits() -> Iterator[Waits]:
    """Listens to the audit."""
    handler, log = Waits(), logging.getLogger(LOG_NAME)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


async def test_requests_over_the_cap_queue_and_none_fails(
    config: SandboxConfig, spec: SandboxSpec, waits: Waits, full: bool
) -> None:
    """Waits are bounded by the work before them: nobody waits longer than everything takes, and all are served."""
    num_requests, cap = (2000, 64) if full else (150, 16)
    spec = msgspec.structs.replace(spec, limits=SMALL)
    most_live = 0

    async def request(host: SandboxHost) -> None:
        nonlocal most_live
        async with host.acquire(spec) as box:
            most_live = max(most_live, host.num_live)
            assert (await sh(box, "echo served", 4 * PATIENCE_S)).stdout == b"served\n"

    config = msgspec.structs.replace(config, max_sandboxes=cap, start_timeout_s=600.0)
    async with SandboxHost.start(config) as host:
        started_s = time.monotonic()
        async with anyio.create_task_group() as group:
            for _ in range(num_requests):
                group.start_soon(request, host)
        elapsed_s = time.monotonic() - started_s
        assert host.num_live == 0
    assert most_live <= cap
    waited_s = [lease.waited_s for lease in waits.leases]  # in the order of their ends
    assert len(waited_s) == num_requests
    assert 0 < min(waited_s) <= max(waited_s) <= elapsed_s
    # First come, first served: the early half waits less than the late half.
    half = num_requests // 2
    assert sum(waited_s[:half]) < sum(waited_s[half:])


async def test_forty_private_networks_live_at_once_and_each_has_its_port(
    config: SandboxConfig, spec: SandboxSpec
) -> None:
    spec = msgspec.structs.replace(spec, limits=SMALL)
    serve = "import socket; s = socket.create_server(('0.0.0.0', 80 + 8000)); print(socket.if_nameindex())"
    all_up = anyio.Event()
    num_up = 0

    async def one(host: SandboxHost) -> None:
        nonlocal num_up
        async with host.acquire(spec) as box:
            num_up += 1
            if num_up == 40:
                all_up.set()
            await all_up.wait()
            outcome = await box.run(Command(argv=("python3", "-I", "-S", "-c", serve), timeout_s=4 * PATIENCE_S))
            assert outcome.stdout == b"[(1, 'lo')]\n", outcome

    async with SandboxHost.start(config) as host, anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(one, host)


async def test_a_program_runs_the_moment_it_was_written(box: Sandbox) -> None:
    """Whoever forks beside a write must not hold the file open: the kernel would refuse to execute it (ETXTBSY)."""
    program = await anyio.Path("/bin/true").read_bytes()

    async def write_and_run(name: str) -> None:
        for number in range(15):
            path = f"/tmp/{name}{number}"
            await box.write_file(path, program, mode=0o755)
            outcome = await box.run(Command(argv=(path,), timeout_s=PATIENCE_S))
            assert outcome.ok, outcome

    async with anyio.create_task_group() as group:
        for name in "abcd":
            group.start_soon(write_and_run, name)


async def test_a_hundred_commands_in_one_sandbox_leave_it_as_it_was(arena: Arena) -> None:
    async with arena.hostile() as box:
        limiter = anyio.CapacityLimiter(8)

        async def one(number: int) -> None:
            async with limiter:
                outcome = await sh(box, f"exit {number % 200}", 4 * PATIENCE_S)
                assert outcome.exit_code == number % 200

        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(one, number)
