"""Layers go out as plain tars and come in as such, from whomever; what is not such a tar is refused by name."""

from __future__ import annotations

import io
import os
import random
import subprocess
import tarfile
from pathlib import Path

import pytest

from sandbox.errors import ConfigError, LayerError
from sandbox.host import SandboxHost
from sandbox.types import JailName, SandboxSpec
from tests.sandbox.layers.walks import python, shell, walk

pytestmark = pytest.mark.anyio

MAKE = r"""
import os
os.makedirs("d/e"); os.mkdir("closed"); open("closed/f", "w").write("x")
names = (b"plain", b"d/\xff\xfe", b"d/new\nline", b"d/e/" + b"n" * 255, "d/é".encode(), b" ", b"empty")
for n, name in enumerate(names):
    with open(name, "wb") as file: file.write(b"" if name == b"empty" else bytes([n]) * n * 30001)
    os.chmod(name, 0o600 + n)
    os.utime(name, ns=(0, 1_700_000_000_123_456_789 + n))
os.symlink("/etc/passwd", "l"); os.symlink(b"\xff", b"l\xff"); os.symlink("t" * 300, "long")
os.chmod("closed", 0); os.chmod("d/e", 0o1777)
"""
TIMES = "import os; print([os.lstat(p).st_mtime_ns for p in (b'plain', b'd/\\xff\\xfe', b'empty')])"


async def test_a_layer_goes_out_and_comes_in_as_it_was(layer_host: SandboxHost, jail: JailName, tmp_path: Path) -> None:
    spec, file = SandboxSpec(jail=jail), tmp_path / "layer.tar"
    async with layer_host.acquire(spec) as box:
        await python(box, MAKE)
        first = await box.seal()
    async with layer_host.acquire(spec, base=first) as box:
        await shell(box, "rm empty; echo over >plain; ln -s x d/e/l; chmod 700 .")
        seen, times = await walk(box), (await python(box, TIMES.replace(", b'empty'", "")))
        layer = await box.seal()
    await layer_host.layers.export(layer, file)
    assert os.listdir(tmp_path) == ["layer.tar"]
    for one in (first, layer):
        await layer_host.layers.release(one)
    again = await layer_host.layers.bring_in(file)
    assert again.bases == ()
    assert again.num_entries == layer.num_entries == len(seen) - 1
    async with layer_host.acquire(spec, base=again) as box:
        assert await walk(box) == seen
        assert await box.diff() == ()
        if not layer_host.layers.why_copied:
            assert await python(box, TIMES.replace(", b'empty'", "")) == times
    await layer_host.layers.release(again)
    listed = subprocess.run(["tar", "tf", file], capture_output=True, check=True)  # noqa: ASYNC221
    assert len(listed.stdout.splitlines()) == len(seen)


async def test_tars_of_others_come_in(layer_host: SandboxHost, tmp_path: Path) -> None:
    (tmp_path / "in" / "d").mkdir(parents=True)
    (tmp_path / "in" / "d" / "f").write_text("hello")
    (tmp_path / "in" / "l").symlink_to("d/f")
    for form in ("gnu", "pax", "ustar"):
        subprocess.run(["tar", f"--format={form}", "-cf", tmp_path / form, "-C", tmp_path / "in", "."], check=True)  # noqa: ASYNC221
        layer = await layer_host.layers.bring_in(tmp_path / form)
        async with layer_host.acquire(SandboxSpec(), base=layer) as box:
            assert await shell(box, "cat l; ls") == "hellod\nl\n"
    orphan = tmp_path / "orphan"
    orphan.write_bytes(tar(file("a/b/c", b"1")))
    layer = await layer_host.layers.bring_in(orphan)
    assert layer.num_entries == 3


def file(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, errors="surrogateescape") as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


LINK = {"type": tarfile.SYMTYPE}
HOSTILE = {
    "up": tar(file("../../etc/cron.d/x", b"1")),
    "absolute": tar(file("/etc/passwd", b"1")),
    "inner up": tar(file("a/../../x", b"1")),
    "through a link": tar(file("d", linkname="/etc", **LINK), file("d/passwd", b"1")),
    "link replaced": tar(file("d", linkname="/etc", **LINK), file("d", type=tarfile.DIRTYPE)),
    "twice": tar(file("f", b"1"), file("f", b"2")),
    "file as directory": tar(file("f", b"1"), file("f/g", b"2")),
    "hard link": tar(file("f", type=tarfile.LNKTYPE, linkname="/etc/shadow")),
    "device": tar(file("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "whiteout": tar(file("gone", type=tarfile.CHRTYPE)),
    "fifo": tar(file("p", type=tarfile.FIFOTYPE)),
    "sparse": tar(file("s", b"1", type=tarfile.GNUTYPE_SPARSE), form=tarfile.GNU_FORMAT),
    "empty link": tar(file("l", linkname="", **LINK)),
    "long link": tar(file("l", linkname="x" * 5000, **LINK)),
    "long name": tar(file("n" * 256, b"1")),
    "long path": tar(file("d/" * 2500 + "f", b"1")),
    "deep": tar(file("d/" * 300 + "f", b"1")),
    "root is a file": tar(file(".", b"1")),
    "root twice": tar(file(".", type=tarfile.DIRTYPE), file("./", type=tarfile.DIRTYPE)),
    "cut off": tar(file("f", b"1" * 5000))[:3000],
    "no end": tar(file("f", b"1"))[:1024],
    "nothing": b"",
    "noise": random.Random(1).randbytes(20_000),
    "compressed": b"\x1f\x8b" + bytes(2000),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_tar_is_refused_and_leaves_nothing(
    under_host: SandboxHost, tmp_path: Path, data: bytes
) -> None:
    source = tmp_path / "hostile.tar"
    source.write_bytes(data)
    before = set(under_host.layers.store.root.iterdir()) if under_host.layers.store.root.exists() else set()
    with pytest.raises(LayerError):
        await under_host.layers.bring_in(source)
    assert {path for path in under_host.layers.store.root.iterdir() if path.name != ".lock"} <= before


async def test_damaged_tars_are_refused_or_come_in_as_plain_files(under_host: SandboxHost, tmp_path: Path) -> None:
    rng, source = random.Random(5), tmp_path / "damaged.tar"
    good = tar(file("d", type=tarfile.DIRTYPE), file("d/f", b"1" * 700), file("d/l", linkname="f", **LINK), file("g"))
    seen = {"refused": 0, "taken": 0}
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 5, 50))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        source.write_bytes(data)
        try:
            layer = await under_host.layers.bring_in(source, max_bytes=1 << 20, max_entries=50)
        except LayerError:
            seen["refused"] += 1
        else:
            seen["taken"] += 1
            await under_host.layers.release(layer)
    assert min(seen.values()) > 0


async def test_what_is_set_user_id_in_a_tar_is_not_so_in_a_layer(under_host: SandboxHost, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(tar(file("f", b"1", mode=0o6755, uid=0, gid=0, uname="root")))
    layer = await under_host.layers.bring_in(tmp_path / "t")
    assert (under_host.layers.store.tree(layer.ident) / "f").stat().st_mode & 0o7777 == 0o755


async def test_caps_hold_for_what_is_brought_in(under_host: SandboxHost, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(tar(file("f", b"1" * 100), file("g", b"1" * 100)))
    with pytest.raises(LayerError, match="max_bytes"):
        await under_host.layers.bring_in(tmp_path / "t", max_bytes=199)
    with pytest.raises(LayerError, match="max_entries"):
        await under_host.layers.bring_in(tmp_path / "t", max_entries=1)
    with pytest.raises(ConfigError, match="max_entries"):
        await under_host.layers.bring_in(tmp_path / "t", max_entries=-1)


async def test_files_that_cannot_be_read_or_written_are_named(under_host: SandboxHost, tmp_path: Path) -> None:
    with pytest.raises(LayerError, match=r"absent\.tar cannot be read"):
        await under_host.layers.bring_in(tmp_path / "absent.tar")
    async with under_host.acquire(SandboxSpec()) as box:
        layer = await box.seal()
    with pytest.raises(LayerError, match="cannot be written"):
        await under_host.layers.export(layer, tmp_path / "absent" / "layer.tar")
    await under_host.layers.release(layer)
    with pytest.raises(LayerError, match="there is no layer"):
        await under_host.layers.export(layer, tmp_path / "layer.tar")
    assert os.listdir(tmp_path) == []
