"""Siblings share an image's bytes and nothing else: what one does with its files, no other can feel or see."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from sandbox.host import SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import IMAGE_ISOLATION, Command, JailName, SandboxSpec
from tests.sandbox.images.tiny_root import make_tiny_root

pytestmark = pytest.mark.anyio

FILES = ("/usr/bin/env", "/usr", "/etc/passwd", "/etc", "/opt/python/bin/python3", "/opt/python/lib", "/.rollout/agent")

HOLD = """
import ctypes, fcntl, os, select, sys
libc, files = ctypes.CDLL(None, use_errno=True), sys.argv[1:]
watch = libc.inotify_init1(os.O_NONBLOCK)
held = [os.open(path, os.O_RDONLY) for path in files]
for path, descriptor in zip(files, held):
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert libc.inotify_add_watch(watch, path.encode(), 0xfff) > 0, path
os.write(1, b"held\\n")
sys.stdin.read(1)
try:
    seen = len(os.read(watch, 65536))
except BlockingIOError:
    seen = 0
print("events:", seen)
os.close(os.open(files[0], os.O_RDONLY))
print("own events:", len(os.read(watch, 65536)) > 0, flush=True)
"""
USE = """
import fcntl, os, sys
for path in sys.argv[1:]:
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if os.path.isdir(path):
        os.listdir(path)
    else:
        os.read(descriptor, 64)
    os.close(descriptor)
print("used", len(sys.argv) - 1)
"""
LEASE = """
import fcntl, os, sys
lock = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.fcntl(lock, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as error:
    print("no lease:", error.strerror)
open("/workspace/ready", "w").close()
sys.stdin.read(1)
"""


@pytest.fixture
async def pair(host: SandboxHost, jail: JailName) -> AsyncIterator[tuple[Sandbox, Sandbox]]:
    """Two live sandboxes of the toolchain image."""
    async with AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(host.acquire(SandboxSpec(image="python", jail=jail))) for _ in range(2)
        ]
        if IMAGE_ISOLATION in first.unenforced:
            pytest.skip(f"environment reason: {host.image_shared}")
        yield first, second


def python(code: str, *arguments: str) -> Command:
    return Command(argv=("python3", "-c", code, *arguments), timeout_s=30)


async def test_a_lock_or_watch_on_a_file_of_the_image_is_not_felt_by_a_sibling(pair: tuple[Sandbox, Sandbox]) -> None:
    holder, user = pair
    go, going = os.pipe()
    told, telling = os.pipe()
    try:
        async with holder.start(python(HOLD, *FILES), fds=(go, telling)) as process:
            os.close(telling)
            assert (await _read_line(told)) == b"held\n"
            used = await user.run(python(USE, *FILES))
            assert used.stdout == b"used %d\n" % len(FILES), used.stderr
            os.write(going, b"x")
            outcome = await process.wait()
            assert outcome.ok, outcome.stderr
        said = os.read(told, 4096)
        assert said == b"events: 0\nown events: True\n"
    finally:
        for descriptor in (go, going, told):
            os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="environment reason: only root can make device nodes")
async def test_a_lock_or_watch_on_a_device_is_not_felt_by_a_sibling_either(pair: tuple[Sandbox, Sandbox]) -> None:
    holder, user = pair
    devices = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    go, going = os.pipe()
    told, telling = os.pipe()
    try:
        async with holder.start(python(HOLD, *devices), fds=(go, telling)) as process:
            os.close(telling)
            assert (await _read_line(told)) == b"held\n"
            null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(null, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(null)
            used = await user.run(python(USE, *(device for device in devices if device != "/dev/full")))
            assert used.stdout == b"used 4\n", used.stderr
            os.write(going, b"x")
            assert (await process.wait()).ok
        assert os.read(told, 4096) == b"events: 0\nown events: True\n"
    finally:
        for descriptor in (go, going, told):
            os.close(descriptor)


async def test_a_lease_on_a_file_of_the_image_does_not_hold_up_a_sibling(pair: tuple[Sandbox, Sandbox]) -> None:
    holder, user = pair
    go, going = os.pipe()
    try:
        async with holder.start(python(LEASE, "/etc/hosts"), fds=(go,)):
            while not (await holder.run(Command(argv=("test", "-e", "/workspace/ready")))).ok:
                continue
            code = "import os; os.open('/etc/hosts', os.O_RDONLY | os.O_NONBLOCK)"
            assert (await user.run(python(code))).ok
    finally:
        os.close(go)
        os.close(going)


async def test_the_mount_table_inside_tells_no_path_of_the_host(host: SandboxHost, jail: JailName) -> None:
    async with host.acquire(SandboxSpec(image="python", jail=jail)) as box:
        shown = (await box.run(Command(argv=("cat", "/proc/self/mountinfo", "/proc/self/mounts")))).stdout.decode()
    assert str(host.state_dir) not in shown
    places = [line.split()[4] for line in shown.splitlines() if " - " in line]
    assert len(set(places)) == len(places), "a mount hides another, which the table still tells of"
    assert not [place for place in places if place.startswith("/.rollout")]


async def test_the_overlays_are_few(host: SandboxHost, jail: JailName) -> None:
    async with host.acquire(SandboxSpec(image="python", jail=jail)) as box:
        shown = (await box.run(Command(argv=("cat", "/proc/self/mountinfo")))).stdout.decode()
    own = {line.split()[2] for line in shown.splitlines() if "devtmpfs" not in line}
    outside_usr = {line.split()[4] for line in shown.splitlines()} & {"/bin", "/sbin", "/lib", "/lib64"}
    assert len(own) <= 6 + len(outside_usr)


@pytest.fixture
def image_dir() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="rollout-image-"))
    yield make_tiny_root(root)
    shutil.rmtree(root)


async def test_the_whole_of_a_directory_image_is_one_overlay(
    host: SandboxHost, jail: JailName, image_dir: Path
) -> None:
    (image_dir / "release").write_text("tiny")
    (image_dir / "etc").mkdir()
    async with host.acquire(SandboxSpec(image=str(image_dir), jail=jail)) as box:
        assert box.unenforced == host.unenforced
        shown = (await box.run(Command(argv=("cat", "/release", "/proc/self/mountinfo")))).stdout.decode()
    assert shown.startswith("tiny")
    views = [line.split() for line in shown.splitlines() if "overlay" in line]
    assert len(views) >= 3
    assert len({line[2] for line in views}) == 1
    assert image_dir.name not in shown


@pytest.mark.skipif(os.geteuid() != 0, reason="environment reason: only root can mount something below an image")
def test_what_is_mounted_below_an_image_stays_visible_and_the_loss_is_reported(
    state_dir: Path, jail: JailName, image_dir: Path
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("environment reason: needs unshare for a mount that the host does not see")
    below = image_dir / "usr" / "below"
    below.mkdir()
    run = [sys.executable, "-m", "rollout.cli.main", "exec", "--state-dir", str(state_dir), "--jail", jail]
    run += ["--image", str(image_dir), "--json"]
    look = ["--", "sh", "-c", "cat /usr/below/f; touch /usr/below/f"]
    make = f"mount -t tmpfs none {below} && echo there > {below}/f && chmod 777 {below}/f && {{ {{}} }}"
    both = f"{shlex.join([*run, *look])}; {shlex.join([*run, '--insist', IMAGE_ISOLATION, *look])}"
    command = ["unshare", "--mount", "sh", "-c", make.replace("{ {} }", f"{{ {both}; }}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    outcome = json.loads(done.stdout)
    assert outcome["stdout"] == "there\n"
    assert "Read-only file system" in outcome["stderr"]
    assert outcome["unenforced"][-1] == IMAGE_ISOLATION
    assert IMAGE_ISOLATION not in outcome["enforced"]
    assert done.returncode == 2, "insisting on it is refused"
    assert f"mounted below the image, such as {below}" in done.stderr


async def _read_line(descriptor: int) -> bytes:
    with anyio.fail_after(30):
        await anyio.wait_readable(descriptor)
    return os.read(descriptor, 64)
