"""Siblings: two sandboxes of one image cannot signal, block, starve or talk to one another."""

from __future__ import annotations

import hashlib

import anyio
import pytest

from sandbox.sandbox import Sandbox
from sandbox.types import IMAGE_ISOLATION, MIB, Command, Limits, Outcome
from tests.sandbox.conformance.arena import PATIENCE_S, Arena, python, sh, shell

pytestmark = pytest.mark.anyio

SERVE = """
import os, socket, time
servers = []
for name in ("\\0meeting", "/dev/shm/meeting", "/tmp/meeting"):
    server = socket.socket(socket.AF_UNIX)
    server.bind(name)
    server.listen()
    servers.append(server)
server = socket.create_server(("0.0.0.0", 4321))
open("ready", "w").close()
time.sleep(600)
"""
CONNECT = """
import errno, socket
for name in ("\\0meeting", "/dev/shm/meeting", "/tmp/meeting"):
    print(errno.errorcode[socket.socket(socket.AF_UNIX).connect_ex(name)])
print(errno.errorcode[socket.socket().connect_ex(("127.0.0.1", 4321))])
for family, kind in ((socket.AF_VSOCK, socket.SOCK_STREAM), (38, 5), (17, 3), (16, 3)):
    try:
        socket.socket(family, kind, 1 if family == 16 else 0)
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
LOCK = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("held by another")
    if len(sys.argv) > 2:
        open("locked", "w").close()
        import time
        time.sleep(600)
"""
WATCH = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
held = 0
while held < int(sys.argv[1]) and libc.inotify_init() >= 0:
    held += 1
open("held", "w").write(str(held))
if len(sys.argv) > 2:
    import time
    time.sleep(600)
"""
NOTICE = """
import ctypes, os, select, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.inotify_init()
assert libc.inotify_add_watch(fd, sys.argv[1].encode(), 0x21) >= 0  # IN_ACCESS, IN_OPEN
open("watching", "w").close()
while not os.path.exists("stop"):
    if select.select([fd], [], [], 0.05)[0]:
        sys.exit("saw a sibling")
"""
SHARED_FILE = "/usr/bin/env"


def assert_own(box: Sandbox, outcome: Outcome) -> None:
    """It went as if nobody else were there; or this host cannot keep images apart, and says so."""
    assert outcome.ok or IMAGE_ISOLATION in box.unenforced, outcome


async def wait_for(box: Sandbox, name: str) -> None:
    outcome = await sh(box, f"while ! [ -e {name} ]; do sleep 0.02; done")
    assert outcome.ok, outcome


async def test_sockets_of_a_sibling_are_not_there_and_other_families_are_refused(arena: Arena, box: Sandbox) -> None:
    async with arena.sibling.start(python(SERVE, timeout_s=600)) as server:
        await wait_for(arena.sibling, "ready")
        outcome = await box.run(python(CONNECT))
        assert outcome.stdout.split() == [
            *[b"ECONNREFUSED", b"ENOENT", b"ENOENT", b"ECONNREFUSED"],
            *[b"EAFNOSUPPORT"] * 4,
        ], outcome
        await server.kill()


async def test_a_lock_on_a_file_of_the_image_is_the_sandboxs_own(arena: Arena, box: Sandbox) -> None:
    async with arena.sibling.start(python(LOCK, SHARED_FILE, "hold", timeout_s=600)) as holder:
        await wait_for(arena.sibling, "locked")
        outcome = await box.run(python(LOCK, SHARED_FILE))
        await holder.kill()
    assert_own(box, outcome)


async def test_a_watch_on_a_file_of_the_image_sees_no_sibling(arena: Arena, box: Sandbox) -> None:
    async with box.start(python(NOTICE, SHARED_FILE, timeout_s=PATIENCE_S)) as watcher:
        await wait_for(box, "watching")
        for _ in range(5):
            assert (await sh(arena.sibling, f"{SHARED_FILE} true && cat {SHARED_FILE} > /dev/null")).ok
        await box.write_file("stop", b"")
        outcome = await watcher.wait()
    assert_own(box, outcome)


async def test_a_sibling_can_watch_although_all_watches_are_taken_or_is_told_that_it_shares(
    arena: Arena, box: Sandbox
) -> None:
    async with box.start(python(WATCH, "128", "hold", timeout_s=600)) as holder:
        await wait_for(box, "held")
        outcome = await arena.sibling.run(python(WATCH, "20"))
        assert outcome.ok
        got = int(await arena.sibling.read_file("held", 10))
        await holder.kill()
    if arena.host.shared_uid:
        assert "uid" in arena.host.shared_uid  # reported, with why
    else:
        assert got == 20


async def test_processes_and_shared_memory_of_a_sibling_are_not_to_be_seen(arena: Arena) -> None:
    segment = "import ctypes; print(ctypes.CDLL(None).shmget(99, 4096, 0o1666))"  # IPC_CREAT, for everybody
    assert (await arena.sibling.run(python(segment))).stdout == b"0\n"
    assert (await sh(arena.sibling, "sleep 600 & echo x > /dev/shm/x")).ok
    async with arena.hostile() as box:
        outcome = await sh(box, "ls -A /dev/shm; tail -n +2 /proc/sysvipc/shm; cat /proc/*/comm | grep -c sleep; true")
        assert outcome.stdout.split() == [b"0"], outcome


async def test_parallel_commands_in_one_workspace_leave_one_consistent_tree(arena: Arena, full: bool) -> None:
    """Each makes, renames and removes files beside the others, as tools with temporary names do."""
    count, rounds = 50, 20 if full else 3
    work = """
i=$1; mkdir -p tree/$i tmp; n=0
while [ $n -lt $2 ]; do
  echo "$i $n" > tmp/$i.$n.part && mv tmp/$i.$n.part tree/$i/$n && cp tree/$i/$n tmp/$i && rm tmp/$i || exit 1
  n=$((n+1))
done
"""
    outcomes: list[Outcome] = []
    async with arena.hostile(Limits(memory_bytes=256 * MIB, pids=200)) as box:

        async def one(number: int) -> None:
            argv = ("sh", "-c", work, "sh", str(number), str(rounds))
            outcomes.append(await box.run(Command(argv=argv, timeout_s=4 * PATIENCE_S)))

        before = (await sh(box, "find . | sort")).stdout
        async with anyio.create_task_group() as group:
            for number in range(count):
                group.start_soon(one, number)
        assert [outcome for outcome in outcomes if not outcome.ok] == []
        order = [(i, n) for i in sorted(map(str, range(count))) for n in sorted(map(str, range(rounds)))]
        expected = "".join(f"{i} {n}\n" for i, n in order).encode()
        listing = "find tree -type f | sort | xargs cat | sha256sum; find tree -type f | wc -l; ls -A tmp"
        digest, _, num_files, *strays = (await sh(box, f"export LC_ALL=C; {listing}")).stdout.decode().split()
        assert int(num_files) == rounds * count
        assert strays == []
        assert digest == hashlib.sha256(expected).hexdigest()
        assert (await sh(box, "rm -r tree tmp; find . | sort")).stdout == before


async def test_a_freeze_of_one_by_its_own_signals_leaves_the_other_running(arena: Arena, box: Sandbox) -> None:
    async with box.start(shell("kill -STOP -1; kill -STOP $$", timeout_s=PATIENCE_S)):
        assert (await sh(arena.sibling, "echo running")).stdout == b"running\n"
