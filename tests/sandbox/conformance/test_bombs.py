"""Bombs: programs that try to take everything, in every situation, with and without cgroups.

Each runs below a limit of processes of its own, and this whole process below another (`pids_cap`).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sandbox.host import SandboxConfig
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Limits, Reason, SandboxSpec
from tests.sandbox.conformance.arena import (
    PATIENCE_S,
    Arena,
    assert_limit_reason,
    below,
    names_inside,
    python,
    sh,
    shell,
    warden_of,
)

pytestmark = pytest.mark.anyio

LIMITS = Limits(memory_bytes=64 * MIB, disk_bytes=8 * MIB, inodes=500, pids=20, open_files=64, file_size_bytes=MIB)
CLASSIC = ":(){ :|:& };:"
FORK = """
import os, sys
refused = 0
while refused < 100:
    try:
        os.fork()
    except BlockingIOError:
        refused += 1
sys.exit(9)
"""
THREADS = """
import sys, threading
event, count = threading.Event(), 0
try:
    while True:
        threading.Thread(target=event.wait, daemon=True).start()
        count += 1
except RuntimeError:
    print(count, flush=True)
    import os
    os._exit(8)
"""
MEMORY_FORK = """
import os
blocks = []
while True:
    try:
        os.fork()
        blocks.append(b"1" * (1 << 20))
    except (BlockingIOError, MemoryError):
        pass
"""
DESCRIPTORS = """
import os, errno
fds = []
try:
    while True: fds += os.pipe()
except OSError as error:
    print(errno.errorcode[error.errno], len(fds))
"""
SOCKET_BUFFERS = """
import errno, socket, sys
pairs, sent = [], 0
try:
    while True:
        pair = socket.socketpair()
        pairs.append(pair)
        pair[0].setblocking(False)
        try:
            while True: sent += pair[0].send(bytes(65536))
        except BlockingIOError: pass
except OSError as error:
    print(errno.errorcode[error.errno], sent >> 20)
"""


@pytest.fixture(params=["auto", "none"])
def config(request: pytest.FixtureRequest, state_dir: Path) -> SandboxConfig:
    """As this host does it best, and as a host without cgroups would."""
    return SandboxConfig(state_dir=str(state_dir), cgroup_backend=request.param)


@pytest.fixture
def spec(spec: SandboxSpec) -> SandboxSpec:
    """A smaller sandbox still."""
    return msgspec.structs.replace(spec, limits=LIMITS)


async def test_the_classic_fork_bomb_meets_its_limit(arena: Arena) -> None:
    before = below(warden_of(arena.host))
    async with arena.hostile() as box:
        outcome = await box.run(shell(f"exec bash -c '{CLASSIC}; sleep 1; exit 3'", timeout_s=PATIENCE_S))
        assert outcome.reason in (Reason.EXIT, Reason.PIDS), outcome
        assert len(below(warden_of(arena.host)) - before) <= LIMITS.pids + 4  # and the jail tool's, the agent, a keeper


async def test_a_fork_bomb_in_the_foreground_is_named_or_ends_with_its_command(box: Sandbox) -> None:
    outcome = await box.run(python(FORK, timeout_s=PATIENCE_S))
    assert_limit_reason(outcome, "pids", Reason.PIDS, [Reason.EXIT])
    assert outcome.exit_code == 9


async def test_a_timeout_ends_a_fork_bomb_to_the_last_process(box: Sandbox) -> None:
    outcome = await box.run(python("import os\nwhile True:\n try: os.fork()\n except OSError: pass", timeout_s=1))
    assert outcome.reason is Reason.TIMEOUT
    assert await names_inside(box) == []


async def test_a_thread_bomb_meets_the_limit_of_processes(box: Sandbox) -> None:
    outcome = await box.run(python(THREADS, timeout_s=PATIENCE_S))
    assert_limit_reason(outcome, "pids", Reason.PIDS, [Reason.EXIT])
    assert outcome.exit_code == 8
    assert int(outcome.stdout) <= LIMITS.pids + 1


async def test_a_bomb_of_memory_and_processes_ends_by_one_limit_or_the_other(box: Sandbox) -> None:
    outcome = await box.run(python(MEMORY_FORK, timeout_s=3))
    expected = {Reason.TIMEOUT, Reason.OOM} if "memory" not in outcome.unenforced else {Reason.TIMEOUT, Reason.EXIT}
    assert outcome.reason in expected, outcome
    after = await sh(box, "echo alive")  # children that outlived their killed parent may still hold everything
    if outcome.reason is Reason.TIMEOUT:
        assert after.stdout == b"alive\n"
    else:
        assert after.reason in (Reason.EXIT, Reason.OOM, Reason.PIDS), after


async def test_a_memory_hog_is_killed_or_told(box: Sandbox) -> None:
    outcome = await box.run(python("x = b'1' * 10**9", timeout_s=PATIENCE_S))
    assert_limit_reason(outcome, "memory", Reason.OOM, [Reason.EXIT])
    if "memory" in outcome.unenforced:
        assert b"MemoryError" in outcome.stderr


async def test_a_disk_filler_meets_its_quota_in_bytes_and_inodes(box: Sandbox) -> None:
    full = await sh(
        box, "i=0; while dd if=/dev/zero of=f$i bs=64k count=16 2>err; do i=$((i+1)); done; cat err >&2; exit 5"
    )
    assert (full.reason, full.exit_code) == (Reason.DISK, 5), full
    assert (await sh(box, "rm -r /workspace/*")).ok
    many = await sh(box, "i=0; while mkdir d$i; do i=$((i+1)); done; exit 6")
    assert (many.reason, many.exit_code) == (Reason.DISK, 6)


async def test_descriptors_run_out_inside_and_nowhere_else(box: Sandbox) -> None:
    outcome = await box.run(python(DESCRIPTORS))
    word, count = outcome.stdout.split()
    assert word == b"EMFILE"
    assert int(count) <= LIMITS.open_files


async def test_memory_of_the_kernel_is_limited_too(box: Sandbox) -> None:
    outcome = await box.run(python(SOCKET_BUFFERS, timeout_s=PATIENCE_S))
    if outcome.reason is Reason.EXIT:
        word, mib = outcome.stdout.split()
        assert word in (b"EMFILE", b"ENFILE", b"ENOMEM", b"ENOBUFS")
        assert int(mib) <= 64
    else:
        assert_limit_reason(outcome, "memory", Reason.OOM, [])


async def test_a_regular_expression_and_a_busy_loop_end_with_their_time(box: Sandbox) -> None:
    outcome = await box.run(python("import re; re.match('(a*)*b', 'a' * 60)", timeout_s=1))
    assert (outcome.reason, outcome.signal) == (Reason.TIMEOUT, 9)
