"""A real verifier over real sandboxes, and the toolchain image that both sides run in."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from rollout.verify.config import VerifierConfig
from rollout.verify.verifier import Verifier
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.images.python import build_python_image

OpenVerifier = Callable[..., AbstractAsyncContextManager[Verifier]]


@pytest.fixture(scope="session")
def verify_state_dir() -> Iterator[Path]:
    """A state directory with the toolchain image, open to the sandboxes' users."""
    path = Path(tempfile.mkdtemp(prefix="rollout-verify-"))
    path.chmod(0o755)
    build_python_image(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def open_verifier(verify_state_dir: Path) -> OpenVerifier:
    """`async with open_verifier(**config) as verifier`: on a sandbox host of its own."""

    @asynccontextmanager
    async def opened(**settings: object) -> AsyncIterator[Verifier]:
        config = VerifierConfig(**{"concurrency": 4, "retries": 0, **settings})
        async with SandboxHost.start(SandboxConfig(state_dir=str(verify_state_dir))) as host:
            async with Verifier(host, config) as verifier:
                yield verifier

    return opened
