"""Hosts for the tests of layers: with bases that lie under workspaces, and with bases that are copied into them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox.host import SandboxConfig, SandboxHost


@pytest.fixture(params=["under", "copied"])
async def layer_host(request: pytest.FixtureRequest, state_dir: Path) -> AsyncIterator[SandboxHost]:
    """A host of each kind; what a sandbox sees of its base does not depend on it."""
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        if request.param == "copied":
            host.layers.why_copied = "a test wants it so"
        elif not await host.layers.lie_under():
            pytest.skip(f"environment: bases are copied here ({host.layers.why_copied})")
        yield host


@pytest.fixture
async def under_host(state_dir: Path) -> AsyncIterator[SandboxHost]:
    """A host whose bases lie under workspaces."""
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        if not await host.layers.lie_under():
            pytest.skip(f"environment: bases are copied here ({host.layers.why_copied})")
        yield host
