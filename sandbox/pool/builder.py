"""What the pool needs of whoever builds jails: the protocol, beside its consumer.

`sandbox.host.SandboxHost` satisfies it.
"""

from __future__ import annotations

from typing import Protocol

import anyio

from sandbox.config import SandboxConfig
from sandbox.jail import Jail
from sandbox.layers.bases import Bases
from sandbox.layers.types import Layer
from sandbox.sandbox import Sandbox
from sandbox.types import JailName, Limits, SandboxSpec


class Builder(Protocol):
    """Builds, leases, cleans and ends jails."""

    @property
    def config(self) -> SandboxConfig:
        """Its own bounds, within which the pool keeps."""
        ...

    @property
    def layers(self) -> Bases:
        """Layers that leases may lie over."""
        ...

    @property
    def lost(self) -> anyio.Event:
        """Set when nothing can be built, leased, cleaned or ended any more."""
        ...

    async def build(self, image: str, jail: JailName, user: int, limits: Limits | None) -> Jail:
        """A new jail. Cancelled: nothing is left.

        Args:
            limits: those that the first lease will probably have.

        Raises:
            ConfigError, CapabilityError: no jail of this kind can ever be built here.
            StartError, SandboxDiedError: this one did not come up; another may.
        """
        ...

    async def lease(self, jail: Jail, spec: SandboxSpec, base: Layer | None = None, *, waited_s: float) -> Sandbox:
        """Hands the jail out with the limits, environment and workspace of this spec, over that base.

        After an exception or cancellation the jail may be leased again where it is `ready`, else it must be destroyed.

        Raises:
            ConfigError, CapabilityError, LayerError, TransferError: the spec or the base cannot be served.
            StartError, SandboxDiedError: this jail cannot serve it; another may.
        """
        ...

    async def reset(self, sandbox: Sandbox) -> bool:
        """Ends a lease. True: its jail is `ready`. False, or cancelled: it must be destroyed."""
        ...

    async def destroy(self, jail: Jail) -> bool:
        """Ends a jail and everything in it. False: something of it cannot be killed, and its number is not reused."""
        ...
