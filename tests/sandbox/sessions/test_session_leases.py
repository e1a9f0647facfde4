"""Sessions in sandboxes of a pool: a jail that had one is clean for the next tenant."""

from __future__ import annotations

import pytest

from sandbox.host import SandboxHost
from sandbox.pool.config import PoolConfig
from sandbox.pool.pool import SandboxPool
from sandbox.sessions.types import Size
from sandbox.types import JailName, SandboxSpec
from tests.sandbox.sessions.conftest import LIMITS

pytestmark = pytest.mark.anyio


async def test_a_jail_is_recycled_after_its_sessions(host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(limits=LIMITS, jail=jail)
    async with SandboxPool.start(host, PoolConfig()) as pool:
        for pty in (None, Size(), None, Size()):
            async with pool.acquire(spec) as box, box.session(pty=pty) as session, box.session() as other:
                await session.run("umask 0; ulimit -n 20; sleep 60 & echo kept > file; cd /tmp; export A=1")
                await session.run("sleep 50", timeout_s=0.1)
                await other.run("setsid sleep 61 & trap '' INT TERM; exit 3")
        async with pool.acquire(spec) as box, box.session() as session:
            outcome = await session.run("pwd; umask; ulimit -n; ls -A /workspace /tmp; echo ${A-none}; jobs")
            assert outcome.stdout == b"/workspace\n0022\n256\n/tmp:\n\n/workspace:\nnone\n"
        statistics = pool.statistics()
    assert statistics.unclean == 0, statistics
    assert statistics.recycled >= 4
