"""Fixtures of the pool's tests: those with fakes run in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio
import pytest

from sandbox.pool.config import PoolConfig
from sandbox.pool.pool import SandboxPool
from tests.sandbox.pool.fakes import FakeBuilder, JumpingLoop


@pytest.fixture
def virtual_time() -> tuple[str, dict[str, Any]]:
    """Overrides `anyio_backend` where a module says so: a loop whose time jumps."""
    return "asyncio", {"loop_factory": JumpingLoop}


@pytest.fixture
def builder() -> FakeBuilder:
    """Builds at once."""
    return FakeBuilder()


@pytest.fixture
def open_pool(builder: FakeBuilder) -> Callable[..., AbstractAsyncContextManager[SandboxPool]]:
    """A pool on the fake builder, with these settings, whose clock is the loop's; the machine holds nothing back."""

    def start(**fields: Any) -> AbstractAsyncContextManager[SandboxPool]:
        ease = {"memory_bytes": 1 << 50, "pids": 1 << 30, "min_free_bytes": 0}
        ease |= {"max_memory_pressure": 1.0, "max_io_pressure": 1.0}
        return SandboxPool.start(builder, PoolConfig(**ease | fields), clock=anyio.current_time)  # type: ignore[arg-type]

    return partial(start)
