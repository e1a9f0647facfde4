"""`diff` and `seal` tell exactly what was done, whatever was done: checked against walks of the whole tree inside."""

from __future__ import annotations

import random

import pytest

from sandbox.host import SandboxHost
from sandbox.types import MIB, JailName, Limits, SandboxSpec
from tests.sandbox.layers.walks import changes_between, python, walk

pytestmark = pytest.mark.anyio

NUM_ROUNDS = 4
SPEC_LIMITS = Limits(disk_bytes=32 * MIB, inodes=8000)

ACT = r"""
import errno, os, random, shutil, sys
rng = random.Random(int(sys.argv[1]))
os.chdir("/workspace")
def every():
    dirs, files = ["."], []
    for folder, names, others in os.walk("."):
        dirs += [f"{folder}/{name}" for name in names if not os.path.islink(f"{folder}/{name}")]
        files += [f"{folder}/{name}" for name in (*others, *names) if f"{folder}/{name}" not in dirs]
    return dirs, files
def name():
    return rng.choice(["a", "b", "c", "d", "e f", "\u00e9", "x" * 200, "-", ".h"]) + str(rng.randrange(4))
def create(dirs, files):
    path = f"{rng.choice(dirs)}/{name()}"
    if not os.path.lexists(path):
        with open(path, "wb") as file: file.write(rng.randbytes(rng.choice([0, 1, 100, 70000])))
        os.chmod(path, rng.choice([0o644, 0o600, 0o755, 0o000, 0o4711, 0o444]))
def edit(dirs, files):
    path = rng.choice(files)
    if os.path.isfile(path) and not os.path.islink(path):
        mode = os.stat(path).st_mode & 0o7777
        os.chmod(path, 0o600)
        with open(path, rng.choice(["ab", "r+b"])) as file: file.write(rng.randbytes(10))
        os.chmod(path, mode)
def hollow(dirs, files):
    path = f"{rng.choice(dirs)}/{name()}"
    if not os.path.lexists(path):
        with open(path, "wb") as file: file.truncate(rng.choice([1, 200000]))
def delete(dirs, files):
    path = rng.choice(files + dirs[1:])
    shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
def rename(dirs, files):
    old, new = rng.choice(files + dirs[1:]), f"{rng.choice(dirs)}/{name()}"
    if not os.path.lexists(new) and not f"{new}/".startswith(f"{old}/"):
        shutil.move(old, new)
def replace(dirs, files):
    old, new = rng.choice(files), rng.choice(files)
    if not os.path.isdir(old) and not os.path.isdir(new): os.rename(old, new)
def mode(dirs, files):
    path = rng.choice(files + dirs)
    if not os.path.islink(path):
        modes = [0o700, 0o755, 0o711, 0o1777, 0o2755]
        os.chmod(path, rng.choice(modes) if os.path.isdir(path) else rng.randrange(0o7777))
def link(dirs, files):
    path = f"{rng.choice(dirs)}/{name()}"
    if not os.path.lexists(path): os.symlink(rng.choice(["/etc/passwd", "..", "a0", "\udcff"]), path)
def hard(dirs, files):
    path = f"{rng.choice(dirs)}/{name()}"
    old = rng.choice(files)
    if not os.path.lexists(path) and not os.path.islink(old): os.link(old, path)
def folder(dirs, files):
    path = f"{rng.choice(dirs)}/{name()}"
    if not os.path.lexists(path): os.mkdir(path, 0o755)
def swap(dirs, files):
    path = rng.choice(files + dirs[1:])
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
        rng.choice([lambda: open(path, "w").close(), lambda: os.symlink("gone", path), lambda: os.mkdir(path)])()
    else:
        os.unlink(path)
        os.mkdir(path)
        open(f"{path}/in", "w").close()
def touch(dirs, files):
    path = rng.choice(files + dirs)
    os.utime(path, (rng.randrange(1 << 30),) * 2, follow_symlinks=False)
acts = [create] * 3 + [edit] * 2 + [folder] * 2
acts += [hollow, delete, rename, replace, mode, link, hard, swap, touch]
for _ in range(int(sys.argv[2])):
    dirs, files = every()
    act = rng.choice(acts)
    if files or act in (create, folder, link, hollow):
        try:
            act(dirs, files)
        except OSError as error:
            known = (errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EACCES, None)
            if error.errno not in known:  # None: moving a directory by copying, where something is closed
                raise
"""


@pytest.mark.parametrize("seed", range(3))
async def test_a_difference_is_exactly_what_two_walks_show(layer_host: SandboxHost, jail: JailName, seed: int) -> None:
    """Rounds of random acts, each in a sandbox over what the round before has sealed."""
    spec = SandboxSpec(jail=jail, limits=SPEC_LIMITS)
    rng = random.Random(seed)
    base, before = None, {".": ("directory", 0o755, 0, "", "")}
    for _ in range(NUM_ROUNDS):
        async with layer_host.acquire(spec, base=base) as box:
            assert await walk(box) == before
            assert await box.diff() == (), "nothing was done yet (but what the walk opened, and closed again)"
            await python(box, ACT, str(rng.randrange(1 << 30)), "150")
            after = await walk(box)
            changes = await box.diff()
            assert list(changes) == changes_between(before, after)
            base, before = await box.seal(), after
            assert await walk(box) == after, "the sealed sandbox goes on as it was"
            assert base.num_entries == len(after) - 1


async def test_times_come_back_to_the_second_and_under_a_workspace_to_the_nanosecond(
    layer_host: SandboxHost, jail: JailName
) -> None:
    stat = "import os; print([os.lstat(p).st_mtime_ns for p in ('f', 'd', 'd/l')])"
    async with layer_host.acquire(SandboxSpec(jail=jail)) as box:
        act = "import os; open('f','w'); os.mkdir('d'); os.symlink('x', 'd/l')"
        times = "s = 10**18 + 987654321; [os.utime(p, ns=(5, s), follow_symlinks=False) for p in ('f', 'd/l', 'd')]"
        before = await python(box, f"{act}; {times}; {stat}")
        layer = await box.seal()
    async with layer_host.acquire(SandboxSpec(jail=jail), base=layer) as box:
        after = await python(box, stat)
        if not layer_host.layers.why_copied:
            assert after == before
        else:
            assert [int(time) // 10**9 for time in after.strip("[]\n").split(",")][:2] == [10**9, 10**9]
