"""A live sandbox forked between two runs of its session: files, directory and variables go along, and nothing else."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from sandbox.errors import LayerError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import JailName, SandboxSpec
from tests.sandbox.sessions.conftest import LIMITS

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("backend", ["auto", "none"])
async def test_a_fork_goes_on_where_the_session_is(state_dir: Path, jail: JailName, backend: str) -> None:
    config = SandboxConfig(state_dir=str(state_dir), **({"cgroup_backend": "none"} if backend == "none" else {}))
    async with (
        SandboxHost.start(config) as host,
        host.acquire(SandboxSpec(limits=LIMITS, jail=jail)) as box,
        box.session() as session,
    ):
        await session.run("mkdir -p src; cd src; echo one > file; export STEP=1 HERE=$PWD; private=2; sleep 60 &")
        state = await session.state()
        assert (await box.usage()).num_running == 0
        async with host.fork(box) as sibling, sibling.session(cwd=state.cwd, env=state.env) as other:
            outcome = await other.run("pwd; cat file; echo $STEP $HERE ${private-none}; echo two > file; jobs")
            assert outcome.stdout == b"/workspace/src\none\n1 /workspace/src none\n"
            outcome = await session.run("cat file; jobs | grep -c Running; kill %1")
            assert outcome.stdout == b"one\n1\n"


async def test_nothing_is_forked_during_a_run(host: SandboxHost, jail: JailName) -> None:
    async with host.acquire(SandboxSpec(limits=LIMITS, jail=jail)) as box, box.session() as session:
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "sleep 50")
            await anyio.sleep(0.1)
            assert (await box.usage()).num_running == 1
            with pytest.raises(LayerError, match="a command runs"):
                async with host.fork(box):
                    pass
            group.cancel_scope.cancel()
        assert (await box.usage()).num_running == 0
        async with host.fork(box) as sibling:
            assert sibling.alive
