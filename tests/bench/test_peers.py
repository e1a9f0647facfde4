"""Outside peers: their helpers, how they are obtained, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from bench.peers import cache, containers, debian, docker, runc
from bench.peers.helper import HelperPeer, open_helper
from bench.peers.packages import PACKAGES, environment_of, find_python
from bench.pool import benchmark, outside
from bench.pool.recycled import ACQUIRE, RECYCLED
from bench.records import CannotMeasure
from bench.rounds import Async, Batch, interleave
from sandbox.estate.state import open_state_dir

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]


async def test_a_helper_does_at_least_one_operation_per_worker_and_tells_the_worker_its_number(tmp_path: Path) -> None:
    async with open_helper("x", "commands", "touch", f"{tmp_path}/{{worker}}") as peer:
        batch = await peer.batch(3, 0.0)
    assert len(batch.samples_s) == 3
    assert sorted(os.listdir(tmp_path)) == ["0", "1", "2"]


async def test_an_operation_that_fails_is_said_and_the_helper_goes_on(tmp_path: Path) -> None:
    async with open_helper("x", "commands", "cat", f"{tmp_path}/file") as peer:
        with pytest.raises(CannotMeasure, match=r"cat ended with status 1: cat: .*No such file"):
            await peer.batch(2, 0.0)
        (tmp_path / "file").touch()
        assert (await peer.batch(1, 0.0)).samples_s


async def test_a_helper_that_does_not_answer_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; exec sleep 1000"
    async with open_helper("x", "commands", "sh", "-c", script, answer_s=1.0) as peer:
        with pytest.raises(CannotMeasure, match="no answer within 1 s"):
            await peer.batch(1, 0.0)
        pid = int((tmp_path / "pid").read_text())
        with anyio.fail_after(10):
            while _runs(pid):  # noqa: ASYNC110 - another process's end
                await anyio.sleep(0.01)
        with pytest.raises(CannotMeasure, match="its helper has ended"):
            await peer.batch(1, 0.0)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_helper_whose_package_is_not_there_says_so() -> None:
    with pytest.raises(CannotMeasure, match="its helper has ended: ModuleNotFoundError: No module named 'swerex'"):
        async with open_helper("x", "swerex_local", "execute"):
            pass


@pytest.mark.parametrize("kind", ["blocking", "async"])
def test_what_an_operation_prints_does_not_come_between_the_answers(kind: str) -> None:
    program = (
        f"from bench.peers.helpers.serving import serve_{kind} as serve\n"
        f"{'async ' if kind == 'async' else ''}def operate(worker):\n"
        "    print('noise', flush=True)\n"
        "    if worker == 2: raise ValueError('no  third')\n"
        "serve(operate)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, input="2 0.0\n3 0.0\n", capture_output=True, text=True, timeout=60,
        check=True,
    )  # fmt: skip
    ready, good, bad = map(json.loads, done.stdout.splitlines())
    assert ready == {}
    assert len(good["samples_s"]) == 2
    assert good["wall_s"] >= max(good["samples_s"])
    assert bad == {"error": "ValueError: no third"}
    assert "noise" in done.stderr


class _Failing:
    """A peer that fails from its third batch on."""

    name = "failing"

    def __init__(self) -> None:
        self.num_batches = 0

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        self.num_batches += 1
        if self.num_batches > 2:
            raise CannotMeasure("out of breath")
        return Batch(samples_s=[1.0], wall_s=1.0)


async def _nothing(worker: int) -> None:
    return None


async def test_an_outside_peer_that_fails_is_dropped_with_its_reason() -> None:
    lost: dict[str, str] = {}
    failing = _Failing()
    series = await interleave(
        [Async("ours", _nothing)], concurrency=1, rounds=4, slice_s=0.0, others=[failing], lost=lost
    )
    assert lost == {"failing": "out of breath"}
    assert list(series) == ["ours"]
    assert len(series["ours"].batches) == 4
    assert failing.num_batches == 3


async def test_our_own_failure_ends_the_measurement() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await interleave([_Failing()], concurrency=1, rounds=4, slice_s=0.0)
    assert "out of breath" in str(caught.value.exceptions)


def test_two_who_want_the_same_thing_make_it_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        time.sleep(0.1)
        (folder / "thing").touch()

    def want() -> None:
        assert (cache.obtain("a thing", make, may_make=True, base=tmp_path) / "thing").exists()

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert made == [tmp_path / "a_thing"]


def test_what_could_not_be_made_is_made_anew(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise CannotMeasure("no network")

    with pytest.raises(CannotMeasure, match="no network"):
        cache.obtain("thing", fail, may_make=True, base=tmp_path)
    with pytest.raises(CannotMeasure, match="not installed yet"):
        cache.obtain("thing", fail, may_make=False, base=tmp_path)
    folder = cache.obtain("thing", lambda folder: None, may_make=True, base=tmp_path)
    assert not (folder / "half").exists()


def test_a_program_that_cannot_do_its_part_is_one_line() -> None:
    with pytest.raises(CannotMeasure, match=r"sh -c .*ended with status 3 and said: second"):
        cache.call(("sh", "-c", "echo first >&2; echo second >&2; exit 3"))
    with pytest.raises(CannotMeasure, match="longer than 0 s"):
        cache.call(("sleep", "60"), timeout_s=0.1)
    with pytest.raises(CannotMeasure, match="No such file"):
        cache.call(("/nonexistent/program",))


def test_a_python_that_nobody_has_is_said() -> None:
    with pytest.raises(CannotMeasure, match=r"needs Python 99\.0"):
        find_python((99, 0))
    assert find_python((3, 11)) == Path(sys.executable)


def test_only_cgroups_of_dead_benchmarks_and_our_own_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead, own, living = (f"rollout-bench-x-{pid}" for pid in (ended.pid, os.getpid(), os.getppid()))
    for name in (dead, own, living, "rollout-5-6", "memory"):
        (tmp_path / name / "inner").mkdir(parents=True)
    (tmp_path / "memory" / dead).mkdir()
    monkeypatch.setattr(containers, "_CGROUPS", tmp_path)
    anyio.run(containers.sweep_cgroups)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living, "rollout-5-6", "memory"])
    assert not (tmp_path / "memory" / dead).exists()


async def test_the_folder_of_a_killed_benchmark_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"])  # noqa: ASYNC220 - ends at once
    ended.wait()
    dead, living = (tmp_path / f"bench-x-{pid}-abc" for pid in (ended.pid, os.getppid()))
    for folder in (dead, living):
        folder.mkdir()
    monkeypatch.setattr(containers, "_SCRATCH", tmp_path)
    async with containers.scratch_folder("x") as own:
        assert {dead.exists(), living.exists(), own.exists()} == {False, True}
        assert not dead.exists()
    assert os.listdir(tmp_path) == [living.name]


def test_the_small_tree_holds_what_its_programs_need(tmp_path: Path) -> None:
    containers.small_tree(tmp_path)
    assert {path for path in containers.PROGRAMS if os.access(tmp_path / path[1:], os.X_OK)} == set(containers.PROGRAMS)
    assert list(tmp_path.rglob("libc.so*"))


def _here(packages: tuple[str, ...]) -> debian.Tools:
    try:
        return debian.tools(packages, may_make=False)
    except CannotMeasure as error:
        pytest.skip(f"environment: {packages[0]} is {error}")


async def test_runc_runs_and_leaves_nothing() -> None:
    tools = _here(debian.RUNC)
    async with runc.open_runc(tools, 2) as peer:
        assert len((await peer.batch(2, 0.0)).samples_s) == 2
    assert _left("runc") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="environment: a Docker engine needs root")
async def test_a_docker_engine_runs_and_leaves_nothing() -> None:
    tools = _here(debian.DOCKER)
    async with docker.open_docker(tools) as peers:
        assert [peer.name for peer in peers] == [docker.RUN, docker.EXEC]
        for peer in peers:
            assert (await peer.batch(1, 0.0)).samples_s
        assert _left("docker") != []
    assert _left("docker") == []


def _left(peer: str) -> list[str]:
    """Cgroups, folders and processes of that peer of ours."""
    cgroups = Path("/sys/fs/cgroup").glob(f"**/{containers.cgroup_name(peer)}")
    folders = Path("/tmp").glob(f"bench-{peer}-*")
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"/tmp/bench-{peer}-".encode() in path.read_bytes():
                processes.append(path)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [*map(str, cgroups), *map(str, folders), *map(str, processes)]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
async def test_a_package_that_is_installed_works(state_dir: Path, package: outside.Package) -> None:
    try:
        environment_of(package, may_make=False)
    except CannotMeasure as error:
        pytest.skip(f"environment: {package.requirement} is {error}")
    open_state_dir(state_dir)
    skipped: list[outside.Skipped] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outside, "PACKAGES", (package,))
        patch.setattr(debian, "tools", _no_tools)
        async with outside.open_outside(state_dir, 1, may_obtain=False, skipped=skipped) as opened:
            names = [peer.name for peer in opened.at(1, 0.0, skipped)]
    assert package.name in names, skipped


def _no_tools(packages: object, *, may_make: bool) -> debian.Tools:
    raise CannotMeasure("no network today")


async def test_the_pool_benchmark_has_a_row_or_a_reason_for_every_peer(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "PACKAGES", PACKAGES[:1])
    monkeypatch.setattr(cache, "cache_dir", lambda: state_dir / "nothing")
    plan = benchmark.Plan(
        concurrencies=(1, 2), rounds=2, slice_s=0.02, num_files=3, may_obtain=False, state_dir=str(state_dir)
    )
    findings = await benchmark.measure(plan)
    rows = {(one.name, one.condition) for one in findings.measures}
    for name in (outside.BARE, outside.BWRAP, outside.BWRAP_LOOP, benchmark.COLD, RECYCLED, ACQUIRE):
        assert {(name, "concurrency 1"), (name, "concurrency 2")} <= rows
    reasons = {one.name: one.reason for one in findings.skipped}
    assert set(reasons) == {PACKAGES[0].name, runc.NAME, f"{docker.RUN}, {docker.EXEC}"}
    assert all("not installed yet" in reason for reason in reasons.values())
    assert len(findings.claims) == 5
    assert all(claim.value is not None for claim in findings.claims)
    assert {(name, "concurrency 1") for name in (benchmark.WARM, benchmark.ATTACHED, benchmark.NEW)} <= rows
    assert sum(" 0 were not and destroyed" in note for note in findings.notes) == 2


async def test_a_peer_that_would_take_all_day_does_not_take_part() -> None:
    skipped: list[outside.Skipped] = []
    opened = outside.Outside()
    async with open_helper("slow", "commands", "true") as peer:
        await opened.add(peer)
        assert opened.at(1, 0.0, skipped) == [peer]
        assert isinstance(peer, HelperPeer)
        assert opened.at(8, 0.0, skipped) == []
    assert [one.name for one in skipped] == ["slow at concurrency 8"]
