"""More commands at once than a sandbox has room for: those too many wait, and nothing is lost."""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import anyio
import pytest

from sandbox.cgroup.absent import AbsentSet
from sandbox.commands.process import Process
from sandbox.errors import SandboxDiedError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.protocol.places import MAX_COMMANDS, MAX_HELPERS
from sandbox.types import Command, JailName, Limits, Outcome, Reason, SandboxSpec

pytestmark = pytest.mark.anyio
LIMITS = Limits(pids=4 * MAX_COMMANDS)
SLEEP = Command(argv=("sleep", "1000"), timeout_s=300)


@pytest.mark.parametrize("backend", ["auto", "none"])
async def test_one_command_too_many_waits_for_its_turn_and_its_time_begins_then(
    state_dir: Path, jail: JailName, backend: Literal["auto", "none"]
) -> None:
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend=backend)
    outcomes: list[Outcome] = []
    async with SandboxHost.start(config) as host, host.acquire(SandboxSpec(jail=jail, limits=LIMITS)) as box:

        async def one_more() -> None:
            outcomes.append(await box.run(Command(argv=("echo", "turn"), timeout_s=2)))

        async def one_too_late() -> None:
            with pytest.raises(SandboxDiedError, match="closed"):
                await box.run(SLEEP)

        async with AsyncExitStack() as stack:
            running = [await stack.enter_async_context(box.start(SLEEP)) for _ in range(MAX_COMMANDS)]
            with anyio.move_on_after(0.05) as scope:
                await box.run(SLEEP)
            assert scope.cancelled_caught, "who does not want to wait any more need not"
            async with anyio.create_task_group() as group:
                group.start_soon(one_more)
                await anyio.sleep(2.1)
                assert outcomes == []
                await box.write_file("f", b"files have places of their own")
                assert (await box.usage()).num_running == MAX_COMMANDS
                await running[7].kill()
            assert [(outcome.ok, outcome.stdout) for outcome in outcomes] == [(True, b"turn\n")]
            async with box.start(SLEEP), anyio.create_task_group() as group:
                group.start_soon(one_too_late)
                await anyio.wait_all_tasks_blocked()
                box.close()


async def test_floods_of_commands_and_transfers_asked_for_at_once_come_to_their_end(
    host: SandboxHost, jail: JailName
) -> None:
    num_done = 0
    async with host.acquire(SandboxSpec(jail=jail, limits=LIMITS)) as box:

        async def command() -> None:
            nonlocal num_done
            assert (await box.run(Command(argv=("true",), timeout_s=60))).ok
            num_done += 1

        async def transfer(number: int) -> None:
            nonlocal num_done
            await box.write_file(f"f{number}", b"x")
            num_done += 1

        async with anyio.create_task_group() as group:
            for number in range(MAX_COMMANDS + MAX_HELPERS):
                group.start_soon(command)
                group.start_soon(command)
                group.start_soon(transfer, number)
    assert num_done == 3 * (MAX_COMMANDS + MAX_HELPERS)


async def test_an_agent_full_of_keepers_is_the_doing_of_what_runs_inside() -> None:
    process = Process(Command(argv=("true",)), AbsentSet(), None, (), lambda: True, cpus=1)
    process.refused(errno.EBUSY)
    outcome = await process.wait()
    assert (outcome.reason, outcome.exit_code) == (Reason.EXIT, 126)
    assert outcome.stderr == b"rollout: fork: Device or resource busy\n"
