"""Forks a live sandbox between two of its commands: the same files, user, limits and environment in another one.

Owns: the layer between the two, for as long as the fork lives. Invariant: the parent goes on as it was; processes are
not forked, so nothing is forked while a command runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import msgspec

from sandbox.errors import LayerError
from sandbox.layers.bases import Bases
from sandbox.layers.types import Layer
from sandbox.sandbox import Sandbox
from sandbox.types import SandboxSpec


class Source(Protocol):
    """Where a fork gets its sandbox from: a host, or a pool."""

    @property
    def layers(self) -> Bases: ...

    def acquire(self, spec: SandboxSpec, base: Layer | None = None) -> AbstractAsyncContextManager[Sandbox]: ...


@asynccontextmanager
async def fork(source: Source, parent: Sandbox) -> AsyncIterator[Sandbox]:
    """A sandbox that starts from what the parent's workspace holds now, ended when the context is left.

    For many siblings of one parent, `Sandbox.seal` once, and acquire each over that layer.

    Raises:
        LayerError: a command runs in the parent (background processes may), or its workspace cannot be sealed.
        SandboxDiedError: the parent has ended.
        and what `acquire` raises.
    """
    if (await parent.usage()).num_running:
        raise LayerError("a command runs in the sandbox; fork it between two commands")
    layer = await parent.seal()
    try:
        async with source.acquire(msgspec.structs.replace(parent.spec, workspace=None), layer) as box:
            yield box
    finally:
        await source.layers.release(layer)
