"""What sandboxed code writes into its workspace stays data: no mark, link or name of its making means anything
later.
"""

from __future__ import annotations

import anyio
import pytest

from sandbox.errors import LayerError
from sandbox.files.caps import FullCaps
from sandbox.host import SandboxHost
from sandbox.layers.reading import read_workspace
from sandbox.types import MIB, Command, JailName, Limits, SandboxSpec
from tests.sandbox.layers.walks import python, shell, walk

pytestmark = pytest.mark.anyio

FORGE = r"""
import os, sys
marks = {"opaque": b"y", "redirect": b"/../../../etc", "metacopy": b"", "origin": b"x" * 40, "whiteout": b"y",
         "impure": b"y", "nlink": b"U+1", "upper": b"y", "protattr": b"i", "overlay.opaque": b"y"}
done = []
for path in sys.argv[1:]:
    for name, value in marks.items():
        for space in ("user.overlay.", "trusted.overlay."):
            try:
                os.setxattr(path, space + name, value)
                done.append((path, space + name))
            except OSError:
                continue
print(len(done))
"""


async def test_forged_marks_of_overlays_mean_nothing_in_a_layer(layer_host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(jail=jail)
    async with layer_host.acquire(spec) as box:
        await shell(box, "mkdir -p d/e; echo 1 >d/f; echo 2 >d/e/g; echo 3 >h")
        before = await walk(box)
        base = await box.seal()
        assert int(await python(box, FORGE, "d", "d/e", "d/f", "h", ".")) > 0 or layer_host.layers.why_copied
        assert await box.diff(), "without a base everything counts"
        forged = await box.seal()
    for layer in (base, forged):
        async with layer_host.acquire(spec, base=layer) as box:
            assert await walk(box) == before
            await python(box, FORGE, "d", "d/e", "d/f", "h", ".")
            assert await walk(box) == before, "nor do they here"
            assert await box.diff() == ()
            child = await box.seal()
        async with layer_host.acquire(spec, base=child) as box:
            assert await walk(box) == before
            assert "overlay" not in await python(box, "import os; print(os.listxattr('d'), os.listxattr('d/f'))")


async def test_a_device_of_deletion_that_code_makes_deletes_nothing(layer_host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(jail=jail)
    make = "import os, sys; os.mknod(sys.argv[1], 0o020000, os.makedev(0, 0))"
    async with layer_host.acquire(spec) as box:
        await shell(box, "echo kept >f; mkdir d; echo kept >d/g")
        base = await box.seal()
        await python(box, make, "ghost")
        assert [(change.path, change.node) for change in await box.diff() if change.node == "device"] == [
            ("ghost", "device")
        ]
        haunted = await box.seal()
        assert [skipped.path for skipped in haunted.skipped] == ["ghost"]
    async with layer_host.acquire(spec, base=haunted) as box:
        assert set(await walk(box)) == {".", "f", "d", "d/g"}
    async with layer_host.acquire(spec, base=base) as box:
        outcome = await box.run(Command(argv=("python3", "-c", make, "ghost")))
        assert outcome.exit_code == 1 or layer_host.layers.why_copied, "an overlay takes none"
        await shell(box, "rm f; echo back >f; rm -r d; mkdir d")
        assert [change.path for change in await box.diff() if change.kind == "deleted"] == ["d/g"]
        child = await box.seal()
    async with layer_host.acquire(spec, base=child) as box:
        assert set(await walk(box)) == {".", "f", "d"}
        assert await shell(box, "cat f") == "back\n"


async def test_what_is_no_file_hides_what_was_there(layer_host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(jail=jail)
    async with layer_host.acquire(spec) as box:
        await shell(box, "echo 1 >f; mkdir d; echo 2 >d/g")
        base = await box.seal()
    async with layer_host.acquire(spec, base=base) as box:
        await shell(box, "rm -r f d; mkfifo f d")
        changes = [(change.path, change.kind, change.node) for change in await box.diff()]
        assert changes == [("d", "changed", "fifo"), ("d/g", "deleted", "file"), ("f", "changed", "fifo")]
        child = await box.seal()
        assert [(skipped.path, skipped.kind) for skipped in child.skipped] == [("d", "fifo"), ("f", "fifo")]
    async with layer_host.acquire(spec, base=child) as box:
        assert set(await walk(box)) == {"."}


async def test_names_of_any_bytes_come_back_and_links_are_never_followed(
    layer_host: SandboxHost, jail: JailName
) -> None:
    spec = SandboxSpec(jail=jail)
    make = r"""
import os
for name in (b"\xff\xfe", b"new\nline", b" ", b"-rf", b"a\\b", b"..x", b"'\"$(id)"):
    open(name, "w").write("x")
os.symlink("/etc", "etc"); os.symlink("/workspace", "loop"); os.symlink(b"\xff", b"l\xff"); os.symlink("../../..", "up")
os.mkdir("d"); os.symlink("/etc/passwd", "d/passwd")
"""
    async with layer_host.acquire(spec) as box:
        await python(box, make)
        before = await walk(box)
        assert {change.path for change in await box.diff()} == set(before) - {"."}
        base = await box.seal()
    async with layer_host.acquire(spec, base=base) as box:
        assert await walk(box) == before
        assert before["etc"] == ("symlink", 0, 0, "", "/etc")


@pytest.mark.parametrize(
    ("bomb", "words"),
    [
        ("import os\nfor n in range(100): open(str(n), 'wb').truncate(60 << 20)", "max_bytes"),
        ("open('f','wb').write(b'x' * 1000000)\nimport os\nfor n in range(70): os.link('f', str(n))", "max_bytes"),
        ("import os\nfor n in range(40):\n os.mkdir('d' * 200); os.chdir('d' * 200)", "path too long"),
        ("import os\nfor n in range(1500):\n os.mkdir('d'); os.chdir('d')", "levels"),
    ],
    ids=["holes", "hard links", "length", "depth"],
)
async def test_a_workspace_that_would_swell_is_refused_and_leaves_nothing(
    layer_host: SandboxHost, jail: JailName, bomb: str, words: str
) -> None:
    async with layer_host.acquire(SandboxSpec(jail=jail)) as box:
        await python(box, bomb)
        store = layer_host.layers.store
        for _ in range(2):
            with pytest.raises(LayerError, match=words):
                await box.seal()
            with pytest.raises(LayerError, match=words):
                await box.diff()
        assert [path.name for path in store.root.iterdir() if path.name.startswith(".new")] == []
        await shell(box, "echo the sandbox goes on")


async def test_caps_of_the_caller_hold(layer_host: SandboxHost, jail: JailName) -> None:
    async with layer_host.acquire(SandboxSpec(jail=jail)) as box:
        await shell(box, "echo 1234567 >a; echo 1234567 >b")
        with pytest.raises(LayerError, match="max_bytes"):
            await box.diff(max_bytes=15)
        with pytest.raises(LayerError, match="max_entries"):
            await box.seal(max_entries=1)
        assert len(await box.diff(max_bytes=16, max_entries=2)) == 2


SWAP = r"""
import os
os.makedirs("real/in"); open("real/in/passwd", "w").write("mine")
os.symlink("/etc", "link")
print("ready", flush=True)
while True:
    os.rename("real", "x"); os.rename("link", "real"); os.rename("real", "link"); os.rename("x", "real")
"""


async def test_a_directory_that_is_swapped_for_a_link_leads_nowhere(under_host: SandboxHost, jail: JailName) -> None:
    """Read without standing still, many times: what comes is refused as changed, or is the workspace's own."""
    async with under_host.acquire(SandboxSpec(jail=jail)) as box:
        async with box.start(Command(argv=("python3", "-c", SWAP), timeout_s=60), output="stream") as process:
            async for piece in process.output():
                assert piece.data == b"ready\n"
                break
            jail_of = next(iter(under_host._live.values()))
            seen, limiter = 0, anyio.CapacityLimiter(1)
            for _ in range(60):
                try:
                    delta = await read_workspace(under_host._warden, jail_of, FullCaps(MIB, 100), None, limiter)
                except LayerError:
                    continue
                seen += 1
                assert all(node.size in (0, 4) for node in delta.nodes.values())
                assert not any(path.startswith((b"real/passwd", b"link/")) for path in delta.nodes)
            assert seen > 0
            assert any(change.path.endswith("/in/passwd") for change in await box.diff()), "standing still, it is whole"


async def test_set_user_id_bits_do_not_reach_the_disk_of_the_host(layer_host: SandboxHost, jail: JailName) -> None:
    async with layer_host.acquire(SandboxSpec(jail=jail)) as box:
        await shell(box, "echo 1 >f; chmod 6777 f; mkdir d; chmod 7777 d")
        assert [change.mode for change in await box.diff()] == [0o1777, 0o777]
        layer = await box.seal()
    tree = layer_host.layers.store.tree(layer.ident)
    assert [path.stat().st_mode & 0o6000 for path in (tree / "f", tree / "d")] == [0, 0]
    assert layer_host.layers.store.root.stat().st_mode & 0o077 == 0


async def test_the_disk_limit_holds_over_a_base(under_host: SandboxHost, jail: JailName) -> None:
    """What lies below takes nothing of it; what is written over it does, copies of what is touched included."""
    large = Limits(disk_bytes=32 * MIB, file_size_bytes=64 * MIB, memory_bytes=256 * MIB)
    async with under_host.acquire(SandboxSpec(jail=jail, limits=large)) as box:
        await shell(box, "head -c 20000000 /dev/urandom >big; mkdir many; cd many; for n in $(seq 900); do : >$n; done")
        base = await box.seal()
    small = Limits(disk_bytes=4 * MIB, inodes=500, file_size_bytes=64 * MIB)
    async with under_host.acquire(SandboxSpec(jail=jail, limits=small), base=base) as box:
        assert await shell(box, "wc -c <big; ls many | wc -l") == "20000000\n900\n"
        usage = await box.usage()
        assert usage.disk_bytes is not None
        assert usage.disk_bytes < MIB
        for too_much in ("echo x >>big", "head -c 5000000 /dev/zero >new", "rm big; head -c 5000000 /dev/zero >big"):
            outcome = await box.run(Command(argv=("/bin/sh", "-c", too_much)))
            assert b"No space left" in outcome.stderr, outcome
            assert outcome.exit_code != 0
            await shell(box, "rm -f new big")
        for too_many in ("chmod 600 many/*", "touch many/*", "rm many/*"):
            outcome = await box.run(Command(argv=("/bin/sh", "-c", too_many)))
            assert b"No space left" in outcome.stderr, outcome
            assert outcome.exit_code != 0


async def test_a_base_that_must_be_copied_and_does_not_fit_is_refused_by_name(
    layer_host: SandboxHost, jail: JailName
) -> None:
    async with layer_host.acquire(SandboxSpec(jail=jail)) as box:
        await shell(box, "head -c 3000000 /dev/urandom >big")
        base = await box.seal()
    spec = SandboxSpec(jail=jail, limits=Limits(disk_bytes=MIB))
    if not layer_host.layers.why_copied:
        async with layer_host.acquire(spec, base=base) as box:
            assert await shell(box, "wc -c <big") == "3000000\n"
        return
    with pytest.raises(Exception, match=r"does not fit into limits\.disk_bytes"):
        async with layer_host.acquire(spec, base=base):
            pass
