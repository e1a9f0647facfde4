"""Threads on both sides: whichever of the engine's started a sandbox may end, and programs inside may have theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import anyio
import pytest
import uvloop

from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import SandboxSpec
from tests.sandbox.conformance.arena import PATIENCE_S, python, sh

THREADS = """
import threading, urllib.request, http.server, concurrent.futures, subprocess, socket
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(lambda n: n * n, range(100))) == 328350
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://localhost:{server.server_port}/kept"
assert urllib.request.urlopen(url).read() == b"page"
print(url, flush=True)
import shutil
if shutil.which("curl"):
    assert subprocess.run(["curl", "-sS", url], capture_output=True, check=True).stdout == b"page"
import multiprocessing
if __name__ == "__main__":
    print(multiprocessing.get_context("fork").Pool(2).map(abs, [-1, -2]))
"""
CLONE3 = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
number = 435
print(libc.syscall(number, 0, 0), errno.errorcode[ctypes.get_errno()])
"""


def in_thread(work: Callable[[], object]) -> None:
    """Runs it in a thread that has ended when this returns."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(4 * PATIENCE_S)
    assert not thread.is_alive()


def test_a_sandbox_outlives_the_thread_that_started_it(config: SandboxConfig, spec: SandboxSpec) -> None:
    """One loop, driven by one thread after another: each start's thread is dead before the sandbox is used."""
    loop = uvloop.new_event_loop()
    seen: list[bytes] = []

    async def live(started: anyio.Event, go_on: anyio.Event) -> None:
        async with SandboxHost.start(config) as host, host.acquire(spec) as box:
            await sh(box, "sleep 600 & echo $! > pid")
            started.set()
            await go_on.wait()
            seen.append((await sh(box, "kill -0 $(cat pid) && echo alive")).stdout)
            async with host.acquire(spec) as another:
                seen.append((await sh(another, "echo alive")).stdout)

    async def begin() -> tuple[anyio.Event, asyncio.Task[None]]:
        started, go_on = anyio.Event(), anyio.Event()
        task = asyncio.ensure_future(live(started, go_on))
        waiter = asyncio.ensure_future(started.wait())
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return go_on, task

    try:
        parts: list[tuple[anyio.Event, asyncio.Task[None]]] = []
        in_thread(lambda: parts.append(loop.run_until_complete(begin())))
        go_on, task = parts[0]

        async def finish() -> None:
            go_on.set()
            await task

        in_thread(lambda: loop.run_until_complete(finish()))
        assert task.done()
        task.result()
    finally:
        loop.close()
    assert seen == [b"alive\n", b"alive\n"]


@pytest.mark.anyio
async def test_threads_pools_servers_and_name_look_ups_work_inside(box: Sandbox) -> None:
    await box.write_file("kept", b"page")
    outcome = await box.run(python(THREADS, timeout_s=PATIENCE_S, env={"no_proxy": "*"}))
    assert outcome.ok, outcome
    assert outcome.stdout.split(b"\n")[1] == b"[1, 2]"


@pytest.mark.anyio
async def test_a_call_that_libc_probes_is_unknown_and_not_forbidden(box: Sandbox) -> None:
    outcome = await box.run(python(CLONE3))
    assert outcome.stdout == b"-1 ENOSYS\n"  # EPERM would break glibc's threads


@pytest.mark.anyio
async def test_names_resolve_or_fail_at_once_without_a_network(box: Sandbox) -> None:
    look_up = """
import socket
print(socket.gethostbyname("localhost"))
try:
    socket.getaddrinfo("example.invalid", 80)
except socket.gaierror:
    print("unknown")
"""
    outcome = await box.run(python(look_up, timeout_s=PATIENCE_S))
    assert outcome.stdout == b"127.0.0.1\nunknown\n"
    assert outcome.usage.wall_s < PATIENCE_S / 4
