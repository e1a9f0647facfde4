"""Our sandbox as a peer: from nothing to a result, and in a sandbox that lives.

Invariant: a command that does not succeed ends the measurement.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from bench.peers.programs import PROGRAM
from bench.records import CannotMeasure
from bench.rounds import Operation
from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, SandboxSpec

_COMMAND = Command(argv=(PROGRAM,))


def cold(host: SandboxHost) -> Operation:
    """Creates a sandbox, runs the command and closes; its inner time ends with the command's outcome."""
    spec = SandboxSpec()

    async def operate(worker: int) -> float:
        began = time.perf_counter()
        async with host.acquire(spec) as box:
            await run_command(box)
            return time.perf_counter() - began

    return operate


def in_live(boxes: Sequence[Sandbox]) -> Operation:
    """Runs the command in the worker's own sandbox."""

    async def operate(worker: int) -> None:
        await run_command(boxes[worker])

    return operate


@asynccontextmanager
async def live(host: SandboxHost, number: int) -> AsyncIterator[list[Sandbox]]:
    """That many sandboxes at once, each with its first command behind it."""
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(host.acquire(SandboxSpec())) for _ in range(number)]
        for box in boxes:
            await run_command(box)
        yield boxes


async def run_command(box: Sandbox) -> None:
    """Runs the command in that sandbox.

    Raises:
        CannotMeasure: it did not succeed.
    """
    outcome = await box.run(_COMMAND)
    if not outcome.ok:
        raise CannotMeasure(f"{PROGRAM} in a sandbox: {outcome}")
