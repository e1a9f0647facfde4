"""Promises, budgets, descriptors and the machine's own state."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from sandbox.errors import ConfigError
from sandbox.pool.admission import FDS_PER_JAIL, FDS_PER_LEASE, FDS_SPARE, Admission, Budget, Need
from sandbox.pool.config import PoolConfig, Warm
from sandbox.pool.pressure import FRESH_S, Gauge, Pressure
from sandbox.types import MIB, Limits, SandboxSpec

EASE = Pressure()


def need(memory_mib: int = 64, pids: int = 8) -> Need:
    return Need(memory_mib * MIB, pids)


def admission(look: Pressure = EASE, **fields: int) -> Admission:
    budget = Budget(**{"leases": 4, "jails": 8, "memory_bytes": 256 * MIB, "pids": 64, **fields})
    return Admission(budget, PoolConfig(), lambda: look)


def test_a_lease_is_promised_its_memory_its_disk_and_its_processes() -> None:
    limits = Limits(memory_bytes=100 * MIB, disk_bytes=28 * MIB, pids=12)
    assert Need.of(SandboxSpec(limits=limits)) == Need(128 * MIB, 12)


@pytest.mark.parametrize(
    ("fields", "word"), [({"leases": 2}, "leases"), ({"memory_bytes": 150 * MIB}, "memory"), ({"pids": 17}, "pids")]
)
def test_what_is_promised_stays_within_each_budget(fields: dict[str, int], word: str) -> None:
    counted = admission(**fields)
    for _ in range(2):
        assert counted.held_back_by(need()) == ""
        counted.take(need())
    assert counted.held_back_by(need()) == word
    counted.give_back(need())
    assert counted.held_back_by(need()) == ""


def test_giving_back_more_than_was_taken_is_a_bug() -> None:
    counted = admission()
    counted.take(need())
    counted.give_back(need())
    with pytest.raises(AssertionError):
        counted.give_back(need())


@pytest.mark.parametrize(
    ("look", "word"),
    [
        (Pressure(free_bytes=200 * MIB, memory=0.0, io=0.0), "free memory"),
        (Pressure(free_bytes=300 * MIB, memory=0.3, io=0.0), "pressure"),
        (Pressure(free_bytes=300 * MIB, memory=0.0, io=0.9), "pressure"),
        (Pressure(free_bytes=300 * MIB, memory=0.1, io=0.1), ""),
        (EASE, ""),
    ],
)
def test_a_machine_under_pressure_holds_back_all_but_the_first_lease(look: Pressure, word: str) -> None:
    counted = admission(look)
    assert counted.held_back_by(need()) == ""
    counted.take(need())
    assert counted.held_back_by(need()) == word


def test_what_can_never_be_served_is_refused_by_name() -> None:
    counted = admission()
    with pytest.raises(ConfigError, match=r"spec\.limits\.memory_bytes = .*raise pool\.memory_bytes"):
        counted.check(need(memory_mib=300))
    with pytest.raises(ConfigError, match=r"spec\.limits\.pids = 65: the pool gives out 64 in all"):
        counted.check(need(pids=65))


def budget(config: PoolConfig, free_fds: int = 100_000, max_jails: int = 4096) -> Budget:
    return Budget.of(config, 1024 * MIB, 1000, free_fds, max_jails)


def test_without_settings_the_promises_are_eight_times_the_hosts_caps() -> None:
    assert budget(PoolConfig(max_leased=40)) == Budget(leases=40, jails=51, memory_bytes=8192 * MIB, pids=8000)
    assert budget(PoolConfig(max_leased=4, warm=(Warm(count=20),))).jails == 20


def test_descriptors_are_reserved_for_every_lease_and_jail() -> None:
    config = PoolConfig(max_leased=100)
    fewest = 100 * (FDS_PER_LEASE + FDS_PER_JAIL) + FDS_SPARE
    assert budget(config, fewest).jails == 100
    assert budget(config, fewest + 2 * FDS_PER_JAIL).jails == 102
    with pytest.raises(ConfigError, match=rf"pool\.max_leased = 100: needs {fewest} more open files .*ulimit -n"):
        budget(config, fewest - 1)
    with pytest.raises(ConfigError, match=r"pool\.max_jails = 120: .*ulimit -n"):
        budget(msgspec.structs.replace(config, max_jails=120), fewest)


def test_without_a_setting_there_are_as_many_leases_as_the_descriptors_reach_for() -> None:
    assert budget(PoolConfig()).leases == 256
    assert budget(PoolConfig(), 1000).leases == (1000 - FDS_SPARE) // (FDS_PER_LEASE + FDS_PER_JAIL)
    assert budget(PoolConfig(max_jails=9)).leases == 9
    assert budget(PoolConfig(), max_jails=12).leases == 12
    with pytest.raises(ConfigError, match=r"pool\.max_leased = None: .*ulimit -n"):
        budget(PoolConfig(), FDS_SPARE)


def test_more_than_the_host_keeps_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"pool\.max_leased = 100: .*sandbox\.max_sandboxes"):
        budget(PoolConfig(max_leased=100), max_jails=99)
    with pytest.raises(ConfigError, match=r"pool\.max_jails = 100: .*sandbox\.max_sandboxes"):
        budget(PoolConfig(max_leased=10, max_jails=100), max_jails=99)
    assert budget(PoolConfig(max_leased=90), max_jails=99).jails == 99


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_leased": 0}, "max_leased"),
        ({"max_leased": 8, "max_jails": 7}, "max_jails"),
        ({"idle_s": -1.0}, "idle_s"),
        ({"aging_s": float("nan")}, "aging_s"),
        ({"max_memory_pressure": 1.5}, "max_memory_pressure"),
        ({"warm": (Warm(count=1), Warm(count=2))}, "warm"),
        ({"warm": (Warm(count=300),), "max_jails": 299}, "warm"),
        ({"max_waiting": "many"}, "max_waiting"),
    ],
)
def test_settings_out_of_bounds_are_refused_by_name(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^pool\.{field} = "):
        PoolConfig(**fields)  # type: ignore[arg-type]


def test_a_warm_jail_that_cannot_be_is_refused_by_name() -> None:
    for fields, field in (
        ({"count": 0}, "count"),
        ({"count": 1, "jail": "chroot"}, "jail"),
        ({"count": 1, "user": -1}, "user"),
    ):
        with pytest.raises(ConfigError, match=rf"^pool\.warm\.{field} = "):
            Warm(**fields)  # type: ignore[arg-type]


def test_the_gauge_reads_what_the_kernel_tells_and_looks_seldom(tmp_path: Path) -> None:
    (tmp_path / "pressure").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    (tmp_path / "pressure/memory").write_text("some avg10=9.00 avg60=0 total=1\nfull avg10=12.50 avg60=0 total=1\n")
    gauge = Gauge(str(tmp_path))
    assert gauge.look(0.0) == Pressure(free_bytes=2 * MIB, memory=0.125, io=None)
    (tmp_path / "meminfo").write_text("MemAvailable:    1024 kB\n")
    assert gauge.look(FRESH_S / 2).free_bytes == 2 * MIB
    assert gauge.look(FRESH_S).free_bytes == MIB


def test_the_gauge_of_this_machine_tells_its_memory() -> None:
    free_bytes = Gauge().look(0.0).free_bytes
    assert free_bytes is not None
    assert free_bytes > MIB
