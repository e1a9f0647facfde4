"""A Docker engine as a peer: `docker run` of a container for each command, and `docker exec` in one that lives.

Owns a `dockerd` that is our child, in namespaces of its own: whatever it starts lives in its pid namespace, whatever it
writes lies in a tmpfs of its mount namespace. Invariant: when its first process ends, by us or because we ended, no
process or mount of it is left; its cgroups and its folder are removed on leaving, or by the next benchmark.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread

from bench.peers.cache import call
from bench.peers.containers import cgroup_name, scratch_folder, small_tree, sweep_cgroups
from bench.peers.debian import Tools
from bench.peers.helper import HelperPeer, open_helper
from bench.peers.programs import PROGRAM
from bench.records import CannotMeasure

RUN = "docker run --rm"
EXEC = "docker exec"
_IMAGE = "bench"
_CONTAINER = "bench-live"
_ENGINE_S = 30.0
"""Until it answers."""
_CALL_S = 60.0
_LOOK_S = 0.05
_DAEMON_OPTIONS = (
    *("--data-root", "/run/bench/data", "--exec-root", "/run/bench/exec", "--pidfile", "/run/bench/pid"),
    *("--iptables=false", "--ip6tables=false", "--bridge=none"),
)
# It writes to /run and /etc/docker whatever it is told: both are its own.
_ENTER = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/bench/etc /run/bench/work
mount -t overlay -o lowerdir=/etc,upperdir=/run/bench/etc,workdir=/run/bench/work overlay /etc
exec "$@"
"""
_IN_NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
    *("sh", "-c", _ENTER, "sh"),
)


@asynccontextmanager
async def open_docker(tools: Tools) -> AsyncIterator[tuple[HelperPeer, HelperPeer]]:
    """The peers `RUN` and `EXEC` of an engine that is ended on leaving.

    Raises:
        CannotMeasure: it does not run here.
    """
    if os.geteuid():
        raise CannotMeasure("a Docker engine needs root")
    async with scratch_folder("docker") as folder:
        env = {**tools.env, "DOCKER_HOST": f"unix://{folder}/socket", "DOCKER_CONFIG": str(folder / "client")}
        try:
            async with _engine(tools, folder):
                await anyio.to_thread.run_sync(_make_image, tools, folder, env)
                run = (str(tools.program("docker")), "run", "--rm", "--network", "none", _IMAGE, PROGRAM)
                live = (str(tools.program("docker")), "exec", _CONTAINER, PROGRAM)
                async with (
                    open_helper(RUN, "commands", *run, env=env) as runs,
                    open_helper(EXEC, "commands", *live, env=env) as execs,
                ):
                    yield runs, execs
        finally:
            with anyio.CancelScope(shield=True):
                await sweep_cgroups()


@asynccontextmanager
async def _engine(tools: Tools, folder: Path) -> AsyncIterator[None]:
    """The daemon, answering on `folder/socket`."""
    (folder / "daemon.json").write_text("{}")
    with (folder / "log").open("wb") as log:
        engine = await asyncio.create_subprocess_exec(
            *_IN_NAMESPACES,
            str(tools.program("dockerd")),
            *("--config-file", f"{folder}/daemon.json", "--host", f"unix://{folder}/socket"),
            *("--cgroup-parent", f"/{cgroup_name('docker')}", *_DAEMON_OPTIONS),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **tools.env},
        )
    try:
        deadline = time.monotonic() + _ENGINE_S
        while not _answers(folder / "socket"):
            if engine.returncode is not None or time.monotonic() > deadline:
                raise CannotMeasure(f"the Docker engine does not start: {_last_line(folder / 'log')}")
            await anyio.sleep(_LOOK_S)
        yield
    finally:
        with suppress(ProcessLookupError):
            engine.kill()  # the kernel kills its child for it, and with that the pid namespace
        with anyio.CancelScope(shield=True):
            await engine.wait()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
    return lines[-1][-300:]


def _make_image(tools: Tools, folder: Path, env: dict[str, str]) -> None:
    """Imports the small tree and starts the container that lives."""
    docker = tools.program("docker")
    (folder / "root").mkdir()
    small_tree(folder / "root")
    call(("tar", "-C", folder / "root", "-cf", folder / "tree.tar", "."))
    call((docker, "import", folder / "tree.tar", _IMAGE), env=env, timeout_s=_CALL_S)
    sleep = ("/usr/bin/sleep", str(sys.maxsize >> 32))
    call((docker, "run", "-d", "--network", "none", "--name", _CONTAINER, _IMAGE, *sleep), env=env, timeout_s=_CALL_S)
