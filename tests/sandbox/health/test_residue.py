"""Census and gc: what dead engines leave is counted and removed; a living engine beside them loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import ConfigError
from sandbox.health.census import Census, is_warden, take_census
from sandbox.health.gc import collect
from sandbox.health.processes import ProcessInfo, ancestors, inspect, kill, lives, snapshot, with_descendants
from sandbox.types import JailName
from tests.sandbox.waiting import wait_until

ENGINE = """
import json, sys
import anyio
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, SandboxSpec

async def main():
    config = SandboxConfig(state_dir=sys.argv[1], cgroup_backend=sys.argv[2])
    spec = SandboxSpec(jail=sys.argv[3])
    async with SandboxHost.start(config) as host, host.acquire(spec) as one, host.acquire(spec) as two:
        for box in (one, two):
            await box.run(Command(argv=("sh", "-c", "sleep 300 & sleep 300 &")))
        print(json.dumps({"roots": host.backend.roots}), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        outcome = await one.run(Command(argv=("echo", "still here")))
        print(json.dumps({"stdout": outcome.stdout.decode()}), flush=True)

anyio.run(main, backend_options={"use_uvloop": True})
"""


class Engine:
    """A process with two sandboxes that each run two background sleeps."""

    def __init__(self, state_dir: Path, backend: str = "auto", jail: JailName = "bubblewrap") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(state_dir), backend, jail],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.roots: list[str] = self.read()["roots"]

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        return result

    def family(self) -> list[ProcessInfo]:
        """Its warden, and everything below that."""
        table = snapshot()
        wardens = [pid for pid, info in table.items() if is_warden(info) and info.parent == self.process.pid]
        return with_descendants(wardens, table)

    def end(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        text: str = self.read()["stdout"]
        assert self.process.wait(timeout=30) == 0
        self.close()
        return text

    def kill(self, *others: ProcessInfo) -> None:
        """Kill the engine, and others with it, at once; itself last, for a warden that sees its end cleans up."""
        for info in others:
            kill(info)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.close()

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def own_state_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rollout-residue-"))
    path.chmod(0o755)
    yield path
    collect(path)  # also after a test that failed half-way
    shutil.rmtree(path)


@contextmanager
def stopped(processes: list[ProcessInfo]) -> Iterator[None]:
    """Processes that cannot react to anything but a kill."""
    for info in processes:
        os.kill(info.pid, signal.SIGSTOP)
    yield


def cleaned_census(state_dir: Path, timeout_s: float = 5.0) -> Census:
    """The census once no process and no cgroup is left over, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        census = take_census(state_dir)
        if not (census.processes or census.cgroups) or time.monotonic() > deadline:
            return census
        time.sleep(0.02)


@pytest.mark.parametrize("backend", ["auto", "none"])
def test_a_living_engine_is_no_leftover(own_state_dir: Path, backend: str) -> None:
    engine = Engine(own_state_dir, backend)
    census = take_census(own_state_dir)
    assert census.engines == (engine.process.pid,)
    assert census.total == 0
    assert collect(own_state_dir).removed == ()
    assert engine.end() == "still here\n"
    assert take_census(own_state_dir) == Census(state_dir=str(own_state_dir))


def test_a_killed_engine_is_cleaned_up_by_its_warden_without_gc(own_state_dir: Path, jail: JailName) -> None:
    engine = Engine(own_state_dir, jail=jail)
    engine.kill()
    census = cleaned_census(own_state_dir)
    # At most the record of its slot remains, which the next engine (or gc) takes over.
    assert census.processes == census.cgroups == census.mounts == ()
    collect(own_state_dir)
    assert take_census(own_state_dir).total == 0


def test_gc_removes_what_engine_and_warden_left_and_spares_the_living(own_state_dir: Path, jail: JailName) -> None:
    living, dead = Engine(own_state_dir, jail=jail), Engine(own_state_dir, jail=jail)
    warden, *jailed = dead.family()
    with stopped(jailed):  # which does not save them from dying with their warden
        dead.kill(warden)
        wait_until(lambda: not any(map(lives, jailed)), 1)
    census = take_census(own_state_dir)
    assert census.engines == (living.process.pid,)
    assert len(census.dead_engines) == 1
    assert set(census.cgroups) >= set(dead.roots)
    collection = collect(own_state_dir)
    assert collection.failed == ()
    assert collection.left.total == 0
    assert not any(Path(root).exists() for root in dead.roots)
    assert living.end() == "still here\n"


@pytest.mark.parametrize("backend", ["auto", "none"])
def test_gc_ends_a_warden_that_hangs_and_all_that_it_holds(own_state_dir: Path, backend: str, jail: JailName) -> None:
    living, dead = Engine(own_state_dir, backend, jail), Engine(own_state_dir, backend, jail)
    warden, *jailed = dead.family()
    assert len(jailed) >= 6
    with stopped([warden, *jailed]):
        dead.kill()
        census = take_census(own_state_dir)
        assert census.engines == (living.process.pid,)
        assert len(census.dead_engines) == 1
        assert {int(entry.split()[0]) for entry in census.processes} >= {info.pid for info in (warden, *jailed)}
        assert set(census.cgroups) >= set(dead.roots)
        collection = collect(own_state_dir, patience_s=0.1)
    assert collection.failed == ()
    assert collection.left.total == 0
    assert not any(Path(root).exists() for root in dead.roots)
    assert not any(map(lives, (warden, *jailed)))
    assert living.end() == "still here\n"


def test_stale_scratch_copies_are_counted_and_removed_but_fresh_ones_stay(own_state_dir: Path) -> None:
    (own_state_dir / "bin").mkdir()
    for name in ("old", "new"):
        (own_state_dir / "bin" / f".stage-{name}").mkdir()
    os.utime(own_state_dir / "bin" / ".stage-old", (0, 0))
    assert take_census(own_state_dir).directories == (str(own_state_dir / "bin" / ".stage-old"),)
    assert collect(own_state_dir).left.total == 0
    assert (own_state_dir / "bin" / ".stage-new").exists()


def test_a_state_directory_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    assert take_census(tmp_path / "absent").total == 0
    assert collect(tmp_path / "absent").removed == ()
    assert not (tmp_path / "absent").exists()


def test_a_state_directory_that_is_none_or_closed_is_a_config_error(
    tmp_path: Path, own_state_dir: Path, unprivileged: tuple[list[str], dict[str, str], Path]
) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        for look in (take_census, collect):
            with pytest.raises(ConfigError, match="not a directory") as caught:
                look(path)
            assert caught.value.field == "state_dir"
    for command in ("census", "gc"):
        words = [sys.executable, "-m", "rollout", command, "--state-dir", str(tmp_path / "file")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        assert done.returncode == 2
        assert "state" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    if os.geteuid() == 0:  # who else has a directory that another user cannot read?
        python, env, _ = unprivileged
        (own_state_dir / "engines").mkdir(mode=0o700)
        words = [*python, "-m", "rollout", "census", "--state-dir", str(own_state_dir)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env=env)
        assert done.returncode == 2
        assert "cannot be read (Permission denied)" in done.stderr


def test_the_commands_report_and_remove(own_state_dir: Path) -> None:
    def rollout(*words: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-m", "rollout.cli.main", *words, "--state-dir", str(own_state_dir), "--json"]
        done = subprocess.run(command, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)
        return done.returncode, json.loads(done.stdout)

    dead = Engine(own_state_dir)
    family = dead.family()
    with stopped(family):
        dead.kill(family[0])
        status, census = rollout("census")
    assert status == 1
    assert census["total"] >= len(dead.roots)
    status, collection = rollout("gc")
    assert status == 0
    assert collection["total_left"] == 0
    assert rollout("census")[0] == 0


def test_a_process_is_killed_by_identity_not_by_number() -> None:
    words = ("sh", "-c", "echo ready; read line")
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        info = inspect(child.pid)
        assert info is not None
        assert info.words == words
        assert os.getpid() in [above.pid for above in ancestors(child.pid, snapshot())]
        impostor = ProcessInfo(info.pid, info.parent, info.started - 1, info.name, info.words)
        assert not kill(impostor)
        assert child.poll() is None
        assert kill(info)
        assert child.wait(timeout=10) == -signal.SIGKILL
        assert not kill(info)
