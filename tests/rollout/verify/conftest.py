"""A real verifier over real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from rollout.verify.config import VerifierConfig
from rollout.verify.verifier import Verifier
from sandbox.host import SandboxConfig, SandboxHost

OpenVerifier = Callable[..., AbstractAsyncContextManager[Verifier]]


@pytest.fixture
def open_verifier(state_dir: Path) -> OpenVerifier:
    """`async with open_verifier(**config) as verifier`: on a sandbox host of its own."""

    @asynccontextmanager
    async def opened(**settings: object) -> AsyncIterator[Verifier]:
        config = VerifierConfig(**{"concurrency": 4, "retries": 0, **settings})
        async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
            async with Verifier(host, config) as verifier:
                yield verifier

    return opened
