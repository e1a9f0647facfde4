"""Whoever dies, nothing is left: engine, warden or both killed while sandboxes start, run and close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import pytest

from sandbox.errors import SandboxDiedError, SandboxError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.state import reconcile
from sandbox.types import Command, JailName, SandboxSpec

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPT = Path(__file__).with_name("engine_process.py")
BACKENDS = ["auto", "none"]


def processes_with(mark: str) -> list[int]:
    """Host processes whose command line has that word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"sleep" in words and mark.encode() in words:
                found.append(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.01)


class Engine:
    """A started engine process, its warden and its cgroups."""

    def __init__(
        self,
        state_dir: Path,
        backend: str,
        mark: str,
        jail: str,
        python: Sequence[str] = (sys.executable,),
        **variables: str,
    ) -> None:
        argv = [*python, str(SCRIPT), str(state_dir), backend, mark, jail]
        env = variables or {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        self.process.stdout.close()
        self.warden, self.roots = int(words[0]), words[1:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_engine_leaves_no_process_no_cgroup_and_no_record(
    state_dir: Path, backend: str, jail: JailName
) -> None:
    mark = f"3{os.getpid()}.1"
    engine = Engine(state_dir, backend, mark, jail)
    wait_until(lambda: len(processes_with(mark)) == 9)
    time.sleep(0.02 * (os.getpid() % 7))  # some moment of the churn
    engine.kill()
    wait_until(lambda: not processes_with(mark), 2)
    wait_until(lambda: gone(engine.warden) and not any(map(os.path.exists, engine.roots)))
    assert reconcile(state_dir) == []


def test_an_unprivileged_engine_that_is_killed_leaves_nothing_either(
    unprivileged: tuple[list[str], dict[str, str], Path], jail: JailName
) -> None:
    python, env, state_dir = unprivileged
    mark = f"3{os.getpid()}.5"
    engine = Engine(state_dir, "auto", mark, jail, python, **env)
    wait_until(lambda: len(processes_with(mark)) == 9)
    engine.kill()
    wait_until(lambda: not processes_with(mark), 2)
    wait_until(lambda: gone(engine.warden))
    assert reconcile(state_dir) == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_engine_and_warden_killed_together_leave_no_process_and_the_next_start_cleans_up(
    state_dir: Path, backend: str, jail: JailName
) -> None:
    mark = f"3{os.getpid()}.2"
    engine = Engine(state_dir, backend, mark, jail)
    beside = Engine(state_dir, backend, mark + "9", jail)
    os.kill(engine.warden, signal.SIGKILL)
    engine.kill()
    wait_until(lambda: not processes_with(mark), 2)
    reconcile(state_dir)
    assert not any(map(os.path.exists, engine.roots))
    assert all(map(os.path.exists, beside.roots))
    assert len(processes_with(mark + "9")) == 9
    beside.kill()
    wait_until(lambda: not processes_with(mark + "9"), 2)
    wait_until(lambda: not any(map(os.path.exists, beside.roots)))


@pytest.mark.anyio
@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_killed_warden_is_a_fault_in_every_sandbox_and_leaves_nothing(
    state_dir: Path, backend: str, jail: JailName
) -> None:
    mark = f"3{os.getpid()}.3"
    config = SandboxConfig(state_dir=str(state_dir), cgroup_backend=backend)  # type: ignore[arg-type]
    async with SandboxHost.start(config) as host:
        async with host.acquire(SandboxSpec(jail=jail)) as box:
            await box.run(Command(argv=("sh", "-c", f"sleep {mark} &")))
            async with box.start(Command(argv=("sleep", mark))) as process:
                os.kill(host._warden.pid, signal.SIGKILL)
                with pytest.raises(SandboxDiedError), anyio.fail_after(5):
                    await process.wait()
        wait_until(lambda: not processes_with(mark), 2)
        with pytest.raises(SandboxError):
            async with host.acquire(SandboxSpec(jail=jail)):
                pass
    assert not any(map(os.path.exists, host.backend.roots))


@pytest.mark.anyio
async def test_a_sandbox_whose_agent_dies_is_a_fault_and_its_siblings_live(state_dir: Path, jail: JailName) -> None:
    mark = f"3{os.getpid()}.4"
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        async with host.acquire(SandboxSpec(jail=jail)) as sibling:
            async with host.acquire(SandboxSpec(jail=jail)) as box:
                async with box.start(Command(argv=("sleep", mark))) as process:
                    wait_until(lambda: bool(processes_with(mark)))
                    agent = parent_of(processes_with(mark)[0])
                    if host.backend.name == "none":  # a keeper stands between
                        agent = parent_of(agent)
                    os.kill(agent, signal.SIGKILL)
                    with pytest.raises(SandboxDiedError), anyio.fail_after(5):
                        await process.wait()
            assert not processes_with(mark)
            assert (await sibling.run(Command(argv=("true",)))).ok
        async with host.acquire(SandboxSpec(jail=jail)) as box:
            assert (await box.run(Command(argv=("true",)))).ok


@pytest.mark.anyio
async def test_cancelling_a_start_leaves_nothing_half_built(state_dir: Path, jail: JailName) -> None:
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        for step in range(12):
            with anyio.move_on_after(0.001 * step):
                async with host.acquire(SandboxSpec(jail=jail)):
                    pass
        assert host.num_live == 0
        wait_until(lambda: children_of(host._warden.pid) == [])
