"""Odd, hostile and vanishing directory images: refused in clear words, or without any effect."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.errors import ConfigError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.images.python import build_python_image
from sandbox.images.resolve import resolve_image
from sandbox.types import Command, JailName, SandboxSpec
from tests.sandbox.images.tiny_root import add_python, make_tiny_root
from tests.sandbox.jails.probes import ask


@pytest.fixture
def image_dir() -> Iterator[Path]:
    """A root file system without any of the jail's own mount points."""
    root = Path(tempfile.mkdtemp(prefix="rollout-image-"))
    yield make_tiny_root(root)
    shutil.rmtree(root, ignore_errors=True)


def spec(image: Path, jail: JailName) -> SandboxSpec:
    return SandboxSpec(image=str(image), jail=jail)


def sh(script: str) -> Command:
    return Command(argv=("sh", "-c", script))


LOOK = sh("id -u; ls -d /proc/1 /dev/null; ls -A /tmp /workspace /dev/shm; echo x > /tmp/f && cat /tmp/f")


@pytest.mark.anyio
async def test_an_image_without_mount_points_gets_them_all(host: SandboxHost, jail: JailName, image_dir: Path) -> None:
    async with host.acquire(spec(image_dir, jail)) as box:
        outcome = await box.run(LOOK)
    assert outcome.stdout.split()[-1] == b"x", outcome.stderr
    assert outcome.stderr == b""


@pytest.mark.anyio
async def test_what_an_image_has_in_their_place_is_left_out(host: SandboxHost, jail: JailName, image_dir: Path) -> None:
    (image_dir / "proc").symlink_to("/usr")
    (image_dir / "tmp").symlink_to("/etc")
    (image_dir / "dev").write_text("a file")
    (image_dir / ".rollout").mkdir()
    (image_dir / ".rollout" / "agent").write_text("#!/bin/sh\necho mine\n")
    (image_dir / "workspace").mkdir()
    (image_dir / "workspace" / "planted").write_text("x")
    async with host.acquire(spec(image_dir, jail)) as box:
        outcome = await box.run(LOOK)
    assert outcome.stdout.split()[-1] == b"x", outcome.stderr
    assert b"planted" not in outcome.stdout
    assert not any((image_dir / "usr").glob("f"))


VISIT = """cat /release && cd '/a b' && cd '/c
d' && cd '/back\\slash' && cd /ünï && cd /usr/passage/open && ls -d /root"""


@pytest.mark.anyio
async def test_odd_names_and_closed_directories_are_shown_as_they_are(
    host: SandboxHost, jail: JailName, image_dir: Path
) -> None:
    for name in ("a b", "c\nd", "back\\slash", "ünï", 'q"uote', os.fsdecode(b"\xff\xfe")):
        (image_dir / name).mkdir(mode=0o755)
        (image_dir / name).chmod(0o755)
    (image_dir / "root").mkdir(mode=0o700)
    (image_dir / "usr" / "passage").mkdir()
    (image_dir / "usr" / "passage" / "open").mkdir(mode=0o755)
    (image_dir / "usr" / "passage" / "open").chmod(0o755)
    (image_dir / "usr" / "passage").chmod(0o711)
    (image_dir / "dangling").symlink_to("../../../nowhere")
    (image_dir / "release").write_text("tiny")
    async with host.acquire(spec(image_dir, jail)) as box:
        outcome = await box.run(sh(VISIT))
        assert outcome.stdout == b"tiny/root\n", outcome.stderr


@pytest.mark.anyio
async def test_special_files_of_an_image_reach_nobody_and_give_nothing(
    host: SandboxHost, jail: JailName, image_dir: Path
) -> None:
    os.mkfifo(image_dir / "usr" / "fifo", 0o666)
    (image_dir / "usr" / "fifo").chmod(0o666)
    os.mkfifo(image_dir / "top-fifo")
    shutil.copyfile(image_dir / "usr/bin/id", image_dir / "usr/bin/rootly")
    (image_dir / "usr/bin/rootly").chmod(0o6755)
    device = image_dir / "usr" / "zero"
    if os.geteuid() == 0:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        device.chmod(0o666)
    with socket.socket(socket.AF_UNIX) as server, (image_dir / "usr" / "fifo").open("rb+", buffering=0) as ours:
        server.bind(str(image_dir / "usr" / "socket"))
        server.listen()
        (image_dir / "usr" / "socket").chmod(0o777)
        os.set_blocking(ours.fileno(), False)
        async with host.acquire(spec(image_dir, jail)) as box:
            outcome = await box.run(sh("rootly -u; exec 3<>/usr/fifo && echo leak >&3; head -c 1 /usr/zero; ls -A /"))
            assert outcome.stdout.split()[0] == b"1000"
            assert b"top-fifo" not in outcome.stdout
            assert b"/usr/zero" in outcome.stderr
        assert ours.read(16) is None, "a FIFO in the image would join sandboxes and host"


CONNECT = """
import errno, socket, sys
print(errno.errorcode.get(socket.socket(socket.AF_UNIX).connect_ex(sys.argv[1]), "connected"))
"""


@pytest.mark.anyio
async def test_a_socket_in_the_image_leads_nowhere(
    host: SandboxHost, jail: JailName, image_dir: Path, state_dir: Path
) -> None:
    add_python(image_dir, (state_dir / "images" / "python").resolve())
    path = image_dir / "opt" / "socket"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(str(path))
        server.listen()
        path.chmod(0o777)
        client.connect(str(path))
        async with host.acquire(spec(image_dir, jail)) as box:
            python = ("/opt/python/bin/python3", "-I", "-S", "-c", CONNECT)
            outcome = await box.run(Command(argv=(*python, "/opt/socket")))
    assert outcome.stdout == b"ECONNREFUSED\n", outcome.stderr


@pytest.mark.anyio
async def test_an_image_that_vanishes_takes_its_files_and_nothing_else(
    host: SandboxHost, jail: JailName, image_dir: Path
) -> None:
    async with host.acquire(spec(image_dir, jail)) as box:
        assert (await box.run(sh("echo kept > /workspace/f"))).ok
        shutil.rmtree(image_dir)
        outcome = await box.run(Command(argv=("id",)))
        assert outcome.exit_code == 127, "what was not in use is gone"
        assert await box.read_file("/workspace/f", 16) == b"kept\n"
        await box.write_file("/workspace/g", b"more")
        with pytest.raises(ConfigError, match="cannot be read as a directory"):
            async with host.acquire(spec(image_dir, jail)):
                pass
    make_tiny_root(image_dir)
    async with host.acquire(spec(image_dir, jail)) as box:
        assert (await box.run(sh("true"))).ok


@pytest.mark.anyio
async def test_an_image_that_sandboxes_cannot_read_is_refused_with_a_remedy(host: SandboxHost, image_dir: Path) -> None:
    whom, remedy = (
        ("this user", "make it readable for this user")
        if host.shared_uid
        else ("other users", rf"chmod -R o\+rX {image_dir}")
    )
    for place in (image_dir / "usr", *(() if host.shared_uid else (image_dir,))):
        place.chmod(0o050)
        with pytest.raises(ConfigError, match=rf"{place} is closed to {whom}.*{remedy}") as caught:
            async with host.acquire(SandboxSpec(image=str(image_dir))):
                pass
        assert caught.value.field == "image"
        place.chmod(0o755)


@pytest.mark.anyio
async def test_an_image_below_a_closed_directory_is_refused(host: SandboxHost, image_dir: Path, tmp_path: Path) -> None:
    if host.shared_uid:
        pytest.skip(f"environment reason: sandboxes run as this user ({host.shared_uid})")
    closed = tmp_path / "root"
    shutil.copytree(image_dir, closed, symlinks=True)
    with pytest.raises(ConfigError, match="is closed to other users"):
        async with host.acquire(SandboxSpec(image=str(closed))):
            pass


def test_the_kernels_file_systems_and_crowds_of_entries_are_no_images(tmp_path: Path) -> None:
    for name in ("/proc", "/sys/fs", "/dev"):
        with pytest.raises(ConfigError, match="the kernel's"):
            resolve_image(name, tmp_path / "state")
    crowd = tmp_path / "crowd"
    crowd.mkdir()
    for number in range(300):
        (crowd / str(number)).touch()
    with pytest.raises(ConfigError, match="300 entries"):
        resolve_image(str(crowd), tmp_path / "state")


@pytest.mark.skipif(not os.path.exists("/usr/bin/python3.11"), reason="environment reason: no system Python 3.11")
@pytest.mark.anyio
async def test_a_rebuilt_toolchain_leaves_running_sandboxes_as_they_are(jail: JailName, image_dir: Path) -> None:
    state = image_dir / "state"
    try:
        first = build_python_image(state)
        async with SandboxHost.start(SandboxConfig(state_dir=str(state))) as host:
            image = SandboxSpec(image="python", jail=jail)
            async with host.acquire(image) as before:
                assert (await ask(before, "import pytest; answer(sys.prefix)")) == "/opt/python"
                second = build_python_image(state, Path("/usr"))
                if first == second:
                    pytest.skip("environment reason: the system's Python is the only one here")
                assert (await ask(before, "import numpy, pytest, sqlite3; answer(sys.version)")) is not None
                async with host.acquire(image) as after:
                    assert (await ask(after, "import numpy, pytest; answer(sys.prefix)")) == "/opt/python"
    finally:
        shutil.rmtree(state)
