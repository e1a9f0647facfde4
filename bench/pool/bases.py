"""Bases for warm sandboxes: sealed workspaces with a number of small files."""

from __future__ import annotations

from bench.records import CannotMeasure
from sandbox.host import SandboxHost
from sandbox.layers.types import Layer
from sandbox.sandbox import Sandbox
from sandbox.types import Command, SandboxSpec

_FILL = "mkdir setup && cd setup && for i in $(seq {number}); do echo $i > $i; done"
_LOOK = Command(argv=("test", "-f", "/workspace/setup/1"))
_FILL_S = 60.0


async def seal_base(host: SandboxHost, num_files: int) -> Layer:
    """A new base, which goes with the host at the latest.

    Raises:
        CannotMeasure: it could not be set up.
    """
    async with host.acquire(SandboxSpec()) as box:
        outcome = await box.run(Command(argv=("sh", "-c", _FILL.format(number=num_files)), timeout_s=_FILL_S))
        if not outcome.ok:
            raise CannotMeasure(f"no base could be set up: {outcome}")
        return await box.seal()


async def require_base(box: Sandbox) -> None:
    """Looks for a base's files in the workspace, by a command.

    Raises:
        CannotMeasure: they are not there.
    """
    outcome = await box.run(_LOOK)
    if not outcome.ok:
        raise CannotMeasure(f"the base is not in the workspace: {outcome}")
