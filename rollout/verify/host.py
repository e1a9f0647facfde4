"""What verification needs of the sandbox layer: the protocols, beside their consumer.

`sandbox.host.SandboxHost` and a pool of warm sandboxes both satisfy `Host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

from rollout.errors import SandboxFault, boundary
from sandbox.errors import (
    AcquireTimeoutError,
    ExhaustedError,
    PoolFullError,
    ProtocolError,
    SandboxDiedError,
    StartError,
    TransferError,
)
from sandbox.types import Command, Outcome, SandboxSpec

_RUN_TIME = (
    StartError,
    ExhaustedError,
    PoolFullError,
    AcquireTimeoutError,
    SandboxDiedError,
    TransferError,
    ProtocolError,
)


class Process(Protocol):
    """A started command."""

    async def wait(self) -> Outcome:
        """Its outcome, once it has ended."""
        ...

    async def kill(self) -> None:
        """Kills everything that it started."""
        ...


class Box(Protocol):
    """A live sandbox."""

    def start(self, command: Command, fds: Sequence[int] = ...) -> AbstractAsyncContextManager[Process]:
        """Starts a command whose descriptors 0, 1, 2, 3 … are copies of `fds`; leaving kills it."""
        ...


class Host(Protocol):
    """Where fresh sandboxes come from."""

    def acquire(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Box]:
        """A fresh sandbox, destroyed on leaving."""
        ...


def sandbox_boundary(doing: str) -> AbstractContextManager[None]:
    """Turns the sandbox layer's run-time faults into `SandboxFault`.

    What is wrong from the start (its `ConfigError`, `CapabilityError`) passes: trying again cannot help.
    """
    return boundary(SandboxFault, doing, *_RUN_TIME)
