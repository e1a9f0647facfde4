"""Jails pass from tenant to tenant over bases: nobody finds anything of another one, or of what lies beneath."""

from __future__ import annotations

import random

import anyio
import pytest

from sandbox.errors import SandboxError
from sandbox.host import SandboxHost
from sandbox.layers.folder import idents_in
from sandbox.sandbox import Sandbox
from sandbox.types import Command, JailName, SandboxSpec
from tests.sandbox.layers.walks import python, shell

pytestmark = pytest.mark.anyio


async def test_a_jail_is_leased_over_one_base_after_another(layer_host: SandboxHost, jail: JailName) -> None:
    """A recycled jail holds nothing of the base before, and the base that its next tenant wants may be there
    already.
    """
    spec = SandboxSpec(jail=jail)
    bases = []
    for text in ("one", "two"):
        async with layer_host.acquire(spec) as box:
            await shell(box, f"echo {text} >{text}")
            bases.append(await box.seal())
    one = await layer_host.build(jail=jail)
    for base, seen in ((bases[0], "one\n"), (bases[0], "one\n"), (None, ""), (bases[1], "two\n"), (bases[0], "one\n")):
        box = await layer_host.lease(one, spec, base)
        assert await shell(box, "ls") == seen
        await shell(box, "echo left >left; rm -f one two")
        assert await box.diff()
        assert await layer_host.reset(box), one.why_unclean
        assert len(one.pins) == (one.base is not None)
    assert (one.base == bases[0]) == (not layer_host.layers.why_copied)
    for base in bases:
        await layer_host.layers.release(base)
    box = await layer_host.lease(one, spec)
    assert await shell(box, "ls") == ""
    assert idents_in(layer_host.layers.store.root) == [], "the last use of the bases has ended"
    await layer_host.destroy(one)


LOCK = """
import fcntl, sys, time
file = open("f", "r")
fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
time.sleep(float(sys.argv[1]))
"""


async def test_a_lock_on_a_file_of_the_base_is_not_felt_by_siblings(layer_host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(jail=jail)
    async with layer_host.acquire(spec) as box:
        await shell(box, "echo 1 >f")
        base = await box.seal()
    async with layer_host.acquire(spec, base=base) as one, layer_host.acquire(spec, base=base) as two:
        async with one.start(Command(argv=("python3", "-c", LOCK, "60")), output="stream") as process:
            async for piece in process.output():
                assert piece.data == b"locked\n"
                break
            assert await python(two, LOCK, "0") == "locked\n"


async def test_nothing_of_the_host_or_of_what_lies_beneath_can_be_named(
    under_host: SandboxHost, jail: JailName
) -> None:
    spec = SandboxSpec(jail=jail)
    async with under_host.acquire(spec) as box:
        await shell(box, "echo 1 >f")
        base = await box.seal()
    async with under_host.acquire(spec, base=base) as box:
        mounts = await shell(box, "cat /proc/self/mountinfo")
        line = next(line for line in mounts.splitlines() if " /workspace " in line)
        assert "lowerdir=0,upperdir=up,workdir=work" in line or {"lowerdir=0", "upperdir=up"} <= set(line.split(","))
        assert str(under_host.state_dir) not in mounts
        assert base.ident not in mounts
        assert await shell(box, "ls -A /.rollout /.rollout/* 2>&1 | grep -c -e up -e work -e tree || true") == "0\n"


async def test_a_lease_that_ends_while_it_is_sealed_never_gets_the_next_tenants_files(
    layer_host: SandboxHost, jail: JailName
) -> None:
    """Neither as a layer nor as a difference; and the base that it needs for either stays until then."""
    spec, rng = SandboxSpec(jail=jail), random.Random(2)
    ends = {"in time": 0, "too late": 0}
    for _ in range(25):
        async with layer_host.acquire(spec) as box:
            await shell(box, "for n in 1 2 3 4 5 6 7 8 9; do echo $n >$n; done")
            base = await box.seal()
        one = await layer_host.build(jail=jail)
        first = await layer_host.lease(one, spec, base)
        await layer_host.layers.release(base)
        results: list[set[str]] = []
        async with anyio.create_task_group() as group:
            for act in (_names_sealed, _names_changed):
                group.start_soon(act, layer_host, first, results)
            await anyio.sleep(rng.choice((0, 0.001, 0.002, 0.004)))
            if await layer_host.reset(first):
                second = await layer_host.lease(one, spec)
                await second.write_file("secret", b"1")
        await layer_host.destroy(one)
        for names in results:
            assert "secret" not in names
        ends["in time" if results else "too late"] += 1
    assert ends["too late"] > 0
    assert idents_in(layer_host.layers.store.root) == []
    assert not layer_host.layers.store._pins


async def _names_sealed(host: SandboxHost, box: Sandbox, results: list[set[str]]) -> None:
    try:
        layer = await box.seal()
    except SandboxError:
        return
    results.append({path.decode() for path in host.layers.store.view(layer)})
    await host.layers.release(layer)


async def _names_changed(host: SandboxHost, box: Sandbox, results: list[set[str]]) -> None:
    try:
        results.append({change.path for change in await box.diff()})
    except SandboxError:
        return


TRACES = (
    "touch d/x; rm d/x",
    "chmod 700 d; chmod 755 d",
    "rm d/f",
    "mv d/f d/g; mv d/g d/f",
    "python3 -c \"import os; os.setxattr('d/f', 'user.a', b'b')\"",
    "python3 -c \"import os; os.setxattr('.', 'user.a', b'b')\"",
    "mkdir d/e; rmdir d/e",
    "ln d/f l; rm l",
    "chmod 700 .; chmod 755 .",
    "cat d/f; ls -R",
    ": >>d/f",
)


async def test_the_next_tenant_over_the_same_base_finds_no_trace_of_the_last(
    layer_host: SandboxHost, jail: JailName
) -> None:
    """Also of what was taken back at once: neither in what is seen, nor in what is used of the quota."""
    spec = SandboxSpec(jail=jail)
    async with layer_host.acquire(spec) as box:
        await shell(box, "mkdir d; echo 1 >d/f; chmod 755 . d")
        base = await box.seal()
    attributes = "import os; print([os.listxattr(path) for path in ('.', 'd', 'd/f')])"
    look = f"stat -c '%n %a %s %Y %h' . d d/f; python3 -c \"{attributes}\""
    one = await layer_host.build(jail=jail)
    box = await layer_host.lease(one, spec, base)
    used = await box.usage()
    seen = await shell(box, look)
    for trace in TRACES:
        await box.run(Command(argv=("sh", "-c", trace)))
        assert await layer_host.reset(box), one.why_unclean
        box = await layer_host.lease(one, spec, base)
        now = await box.usage()
        assert (now.disk_bytes, now.inodes) == (used.disk_bytes, used.inodes), trace
        times_apart = [line.split()[:3] + line.split()[4:] for line in (await shell(box, look)).splitlines()]
        assert times_apart == [line.split()[:3] + line.split()[4:] for line in seen.splitlines()], trace
        assert await box.diff() == (), trace
    await layer_host.destroy(one)
