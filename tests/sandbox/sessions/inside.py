"""Looks at what is in a sandbox beside a session."""

from __future__ import annotations

import time

import anyio

from sandbox.sandbox import Sandbox
from sandbox.types import Command

PATIENCE_S = 30.0


async def names(box: Sandbox) -> list[bytes]:
    """Names of the processes that live inside, but for ours and the shell that asks."""
    script = "for p in /proc/[0-9]*; do read -r _ name state _ < $p/stat && [ $state != Z ] && echo $name; done"
    found = [name.strip(b"()") for name in (await box.run(Command(argv=("sh", "-c", script)))).stdout.split()]
    found.remove(b"sh")
    return sorted(name for name in found if not name.startswith(b"rollout-"))


async def names_become(box: Sandbox, *wanted: bytes) -> None:
    """They are these, once what was just forked has its own name and what was killed is gone."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (found := await names(box)) != sorted(wanted):
        assert time.monotonic() < deadline_s, found
        await anyio.sleep(0.02)
