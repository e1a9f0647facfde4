"""Sandboxes for sessions: small limits, each jail, with and without cgroups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.sessions.session import Session
from sandbox.types import MIB, JailName, Limits, SandboxSpec
from tests.sandbox.tools import installed

LIMITS = Limits(memory_bytes=96 * MIB, disk_bytes=16 * MIB, pids=32, file_size_bytes=64 * MIB)


@asynccontextmanager
async def a_box(state_dir: Path, jail: JailName, backend: str) -> AsyncIterator[Sandbox]:
    config = SandboxConfig(state_dir=str(state_dir), **({"cgroup_backend": "none"} if backend == "none" else {}))
    async with SandboxHost.start(config) as host, host.acquire(SandboxSpec(limits=LIMITS, jail=jail)) as box:
        yield box


@pytest.fixture
async def box(state_dir: Path, jail: JailName) -> AsyncIterator[Sandbox]:
    """With what cgroups this host has."""
    async with a_box(state_dir, jail, "auto") as box:
        yield box


@pytest.fixture(params=["nsjail-auto", "bubblewrap-none"])
async def any_box(state_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    """Also without any cgroup, where processes are told apart by descent alone."""
    jail, backend = request.param.split("-")
    async with a_box(state_dir, installed(jail), backend) as box:
        yield box


@pytest.fixture
async def session(box: Sandbox) -> AsyncIterator[Session]:
    """Of the shell that the image prefers (bash, on a host that has it)."""
    async with box.session() as session:
        yield session
