"""Layers live as long as they are used, and no longer; sealing disturbs nobody and leaves nothing half done."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from sandbox.errors import ConfigError, LayerError, SandboxDiedError
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.layers.folder import idents_in
from sandbox.layers.types import Layer
from sandbox.sandbox import Sandbox
from sandbox.types import MIB, Command, JailName, Limits, SandboxSpec
from tests.sandbox.layers.sealing_engine import ENGINE
from tests.sandbox.layers.walks import python, shell, walk

pytestmark = pytest.mark.anyio


async def test_siblings_do_not_see_each_other_and_the_parent_goes_on(layer_host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(jail=jail)
    async with layer_host.acquire(spec) as parent:
        await shell(parent, "echo base >f; mkdir d; echo base >d/g")
        before = await walk(parent)
        layer = await parent.seal()
        async with layer_host.acquire(spec, base=layer) as one, layer_host.acquire(spec, base=layer) as two:
            await shell(one, "echo one >f; rm -r d; echo one >new")
            await shell(parent, "echo parent >f")
            assert await walk(two) == before
            await shell(two, "chmod 700 d; echo two >d/g")
            assert await shell(one, "cat f; ls") == "one\nf\nnew\n"
            assert await shell(parent, "cat f d/g") == "parent\nbase\n"
            assert [change.path for change in await two.diff()] == ["d", "d/g"]
        async with layer_host.acquire(spec, base=layer) as third:
            assert await walk(third) == before


async def test_siblings_have_uids_of_their_own_and_git_trusts_the_base(under_host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(jail=jail, limits=Limits(pids=32))
    async with under_host.acquire(spec) as box:
        await shell(box, "git init -q . && echo 1 >f && git add f && git -c user.name=a -c user.email=b commit -qm x")
        layer = await box.seal()
    async with under_host.acquire(spec, base=layer) as one, under_host.acquire(spec, base=layer) as two:
        for box in (one, two):
            assert await shell(box, "git status --porcelain; stat -c %u:%g f .git") == "1000:1000\n" * 2
            await shell(box, "echo 2 >>f && git -c user.name=a -c user.email=b commit -qam y && git log")
        uids = {one.host_uid for one in under_host._live.values()}
        assert len(uids) == 2


async def test_another_user_inside_owns_the_base_as_well(layer_host: SandboxHost, jail: JailName) -> None:
    async with layer_host.acquire(SandboxSpec(jail=jail, user=0)) as box:
        await shell(box, "echo 1 >f; chmod 600 f; mkdir d; chmod 700 d")
        layer = await box.seal()
    async with layer_host.acquire(SandboxSpec(jail=jail, user=4242), base=layer) as box:
        assert await shell(box, "cat f; stat -c %u:%a f d; echo 2 >d/g") == "1\n4242:600\n4242:700\n"


async def test_layers_lie_over_layers(layer_host: SandboxHost, jail: JailName) -> None:
    spec, base, expected = SandboxSpec(jail=jail), None, {}
    for number in range(6):
        async with layer_host.acquire(spec, base=base) as box:
            await shell(box, f"echo {number} >only{number}; echo {number} >all; rm -f only{number - 2}")
            expected = await walk(box)
            assert {"all", f"only{number}"} <= {change.path for change in await box.diff()}
            base = await box.seal()
    async with layer_host.acquire(spec, base=base) as box:
        assert await walk(box) == expected
        assert set(expected) == {".", "all", "only4", "only5"}


async def test_many_layers_over_each_other_become_one_that_shows_the_same(
    under_host: SandboxHost, jail: JailName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.layers.workspace.MAX_DEPTH", 2)
    spec, base, depths = SandboxSpec(jail=jail), None, []
    store = under_host.layers.store
    act = "mkdir -p d/e; echo {0} >d/e/{0}; echo {0} >all; rm -f d/e/{1}; rm -rf o; mkdir o; echo >o/{0}; ln -sf {0} l"
    for number in range(6):
        async with under_host.acquire(spec, base=base) as box:
            await shell(box, act.format(number, number - 2) + "; chmod 600 all d/e/*")
            expected, older = await walk(box), base
            base = await box.seal()
            depths.append(len(base.bases))
        async with under_host.acquire(spec, base=base) as box:
            assert await walk(box) == expected
            assert await box.diff() == ()
        if older is not None:
            await under_host.layers.release(older)
    assert depths == [0, 1, 0, 1, 0, 1]
    assert idents_in(store.root) == sorted(base.chain if base else ()), "what was merged is not needed any more"


async def test_a_frozen_sandbox_can_be_sealed_and_stays_frozen(under_host: SandboxHost, jail: JailName) -> None:
    async with under_host.acquire(SandboxSpec(jail=jail)) as box:
        await shell(box, "echo 1 >f")
        await box.freeze()
        layer = await box.seal()
        assert [change.path for change in await box.diff()] == ["f"]
        assert box.frozen
        assert layer.num_entries == 1
        await box.thaw()
        assert await shell(box, "cat f") == "1\n"


COUNT = """
import os
import random
n = 0
print("ready", flush=True)
while True:
    n += 1
    for name in ("a", "b"):
        with open(name, "w") as file: file.write(str(n))
"""


async def test_a_running_command_stands_still_while_it_is_sealed(under_host: SandboxHost, jail: JailName) -> None:
    """Two files that are written in turn differ by at most one step in every layer, and the command goes on."""
    async with under_host.acquire(SandboxSpec(jail=jail)) as box:
        async with box.start(Command(argv=("python3", "-c", COUNT), timeout_s=60), output="stream") as process:
            async for _ in process.output():
                break
            last = -1
            for _ in range(5):
                layer = await box.seal()
                tree = under_host.layers.store.tree(layer.ident)
                texts = [(tree / name).read_text() for name in ("a", "b") if (tree / name).exists()]
                numbers = [int(text) for text in texts if text]
                if len(numbers) == 2:
                    assert numbers[0] - numbers[1] in (0, 1)
                    assert numbers[1] >= last
                    last = numbers[0]
                await under_host.layers.release(layer)
            assert process.settled is False


async def test_a_layer_goes_with_the_last_that_uses_it(layer_host: SandboxHost, jail: JailName) -> None:
    root = layer_host.layers.store.root
    async with layer_host.acquire(SandboxSpec(jail=jail)) as box:
        await shell(box, "echo 1 >f")
        base = await box.seal()
    async with layer_host.acquire(SandboxSpec(jail=jail), base=base) as box:
        await shell(box, "echo 2 >g")
        child = await box.seal()
        await layer_host.layers.release(base)
        assert base.ident in idents_in(root)
        assert await shell(box, "cat f") == "1\n"
    assert (base.ident in idents_in(root)) == (base.ident in child.bases)
    await layer_host.layers.release(child)
    assert not {base.ident, child.ident} & set(idents_in(root))
    with pytest.raises(LayerError, match="not in use"):
        await layer_host.layers.release(child)
    with pytest.raises(LayerError, match="there is no layer"):
        async with layer_host.acquire(SandboxSpec(jail=jail), base=child):
            pass


async def test_only_layers_can_be_bases(layer_host: SandboxHost) -> None:
    with pytest.raises(ConfigError, match="must be a Layer"):
        async with layer_host.acquire(SandboxSpec(), base="tree"):  # type: ignore[arg-type]
            pass
    with pytest.raises(LayerError, match="no layer's name"):
        async with layer_host.acquire(SandboxSpec(), base=Layer(ident="../../etc")):
            pass


async def test_kept_layers_outlive_their_host_and_others_do_not(state_dir: Path) -> None:
    config = SandboxConfig(state_dir=str(state_dir))
    async with SandboxHost.start(config) as host, host.acquire(SandboxSpec()) as box:
        await shell(box, "echo 1 >f")
        kept, other = await box.seal(), await box.seal()
        await host.layers.keep(kept)
    async with SandboxHost.start(config) as host:
        with pytest.raises(LayerError, match="there is no layer"):
            await host.layers.find(other.ident)
        found = await host.layers.find(kept.ident)
        assert found == kept
        async with host.acquire(SandboxSpec(), base=found) as box:
            assert await shell(box, "cat f") == "1\n"
        (host.layers.store.root / kept.ident / "kept").unlink()
        await host.layers.release(found)
        assert kept.ident not in idents_in(host.layers.store.root)


async def test_a_cancelled_seal_leaves_nothing_and_the_sandbox_goes_on(layer_host: SandboxHost, jail: JailName) -> None:
    limits = Limits(disk_bytes=128 * MIB, memory_bytes=256 * MIB)
    async with layer_host.acquire(SandboxSpec(jail=jail, limits=limits)) as box:
        await python(box, "for n in range(60): open(str(n), 'wb').write(bytes([n]) * (1 << 20))")
        for delay_s in (0.001, 0.01, 0.03, 0.06):
            before = set(layer_host.layers.store._pins)
            with anyio.move_on_after(delay_s) as scope:
                await box.seal()
            if scope.cancelled_caught:
                assert set(layer_host.layers.store._pins) == before
            assert not [path for path in layer_host.layers.store.root.iterdir() if path.name.startswith(".new")]
            assert not box.frozen
        assert await shell(box, "ls | wc -l") == "60\n"
        assert (await box.seal()).num_bytes == 60 * MIB


async def test_the_death_of_a_sandbox_or_its_warden_ends_its_sealing(state_dir: Path, jail: JailName) -> None:
    limits = Limits(disk_bytes=128 * MIB, memory_bytes=256 * MIB)
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        async with host.acquire(SandboxSpec(jail=jail, limits=limits)) as box:
            await python(box, "for n in range(60): open(str(n), 'wb').write(bytes([n]) * (1 << 20))")
            async with anyio.create_task_group() as group:
                group.start_soon(_end_soon, host)
                with pytest.raises((SandboxDiedError, LayerError)):
                    await _seal_for_ever(box)
        assert not [path for path in host.layers.store.root.iterdir() if path.name.startswith(".new")]


async def _seal_for_ever(box: Sandbox) -> None:
    while True:
        await box.seal()


async def _end_soon(host: SandboxHost) -> None:
    await anyio.sleep(0.02)
    os.kill(host._warden.pid, signal.SIGKILL)


async def test_what_a_killed_engine_sealed_goes_when_the_next_one_seals(state_dir: Path) -> None:
    process = await anyio.open_process([sys.executable, "-c", ENGINE, str(state_dir)], stderr=None)
    assert process.stdout is not None
    ident = (await process.stdout.receive()).decode().strip()
    root = state_dir / "layers"
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host, host.acquire(SandboxSpec()) as box:
        await box.seal()
        assert ident in idents_in(root), "its engine lives"
        assert len([path for path in root.iterdir() if path.name.startswith(".new")]) == 1
        process.kill()
        await process.aclose()
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host, host.acquire(SandboxSpec()) as box:
        layer = await box.seal()
        assert idents_in(root) == [layer.ident]
        assert not [path for path in root.iterdir() if path.name.startswith(".new")]


async def test_a_fork_has_files_and_environment_and_the_parent_goes_on(layer_host: SandboxHost, jail: JailName) -> None:
    spec = SandboxSpec(jail=jail, env={"WHO": "me"}, user=77)
    async with layer_host.acquire(spec) as parent:
        await shell(parent, "mkdir d; echo 1 >d/f; (sleep 50 >/dev/null 2>&1 &)")
        async with layer_host.fork(parent) as child:
            assert await shell(child, "cat d/f; echo $WHO; id -u; ls /proc | grep -c '^[0-9]'") != ""
            await shell(child, "echo 2 >d/f")
            await shell(parent, "echo 3 >>d/f")
            async with layer_host.fork(child) as grandchild:
                assert await shell(grandchild, "cat d/f; echo $WHO; id -u") == "2\nme\n77\n"
            assert child.spec == parent.spec
        assert await shell(parent, "cat d/f") == "1\n3\n"
    assert not layer_host.layers.store._pins
    assert idents_in(layer_host.layers.store.root) == []


async def test_a_sandbox_in_which_a_command_runs_is_not_forked(layer_host: SandboxHost, jail: JailName) -> None:
    async with layer_host.acquire(SandboxSpec(jail=jail)) as parent, parent.start(Command(argv=("sleep", "50"))):
        with pytest.raises(LayerError, match="between two commands"):
            async with layer_host.fork(parent):
                pass
