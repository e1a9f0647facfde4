"""Who gets which jail, what is built, what gives way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sandbox.jail import JailKey
from sandbox.pool.backoff import Backoff
from sandbox.pool.demand import Demand
from sandbox.pool.growth import Build, Growth
from sandbox.pool.shelf import Shelf
from sandbox.pool.statistics import Histogram
from tests.sandbox.pool.fakes import FakeJail

HOST, OTHER = JailKey("host", "bubblewrap", 1000), JailKey("python", "nsjail", 0)


def begin_all(growth: Growth[str]) -> list[Build[str]]:
    begun = []
    while (key := growth.next_wanted()) is not None:
        begun.append(growth.begin(key))
    return begun


def test_one_build_is_begun_for_each_acquire_that_lacks_a_jail() -> None:
    growth: Growth[str] = Growth(8)
    for name in "abc":
        growth.want(HOST, name)
    assert [build.client for build in begin_all(growth)] == ["a", "b", "c"]
    assert growth.next_wanted() is None


def test_no_more_are_begun_at_once_than_allowed_and_the_kinds_take_turns() -> None:
    growth: Growth[str] = Growth(3)
    for name in "abcd":
        growth.want(HOST, name)
    growth.want(OTHER, "z")
    assert [build.client for build in begin_all(growth)] == ["a", "z", "b"]


def test_whichever_jail_comes_first_serves_whom_has_waited_longest() -> None:
    growth: Growth[str] = Growth(8)
    growth.want(HOST, "a")
    growth.want(HOST, "b")
    first, second = begin_all(growth)
    assert growth.end(second) == "b"
    assert growth.first(HOST) == "a"
    growth.leave(HOST, "a")  # served; its own build goes on, and is b's now
    growth.want_again(HOST, "b")
    assert first.client == "b"
    assert growth.next_wanted() is None
    assert growth.end(first) == "b"


def test_a_slow_build_gives_up_its_turn_and_its_acquire_gets_another() -> None:
    growth: Growth[str] = Growth(1)
    growth.want(HOST, "a")
    growth.want(HOST, "b")
    (stuck,) = begin_all(growth)
    growth.overdue(stuck)
    growth.overdue(stuck)
    assert (growth.num_building, growth.num_slow) == (1, 1)
    (build,) = begin_all(growth)
    assert build.client == "b"
    assert growth.end(build) == "b"
    growth.leave(HOST, "a")
    growth.want_again(HOST, "b")
    (build,) = begin_all(growth)
    assert build.client == "b"
    assert growth.end(stuck) is None
    assert growth.first(HOST) == "b"


def test_where_everything_is_slow_no_more_is_begun_in_vain_than_twice_the_turns() -> None:
    growth: Growth[str] = Growth(2)
    for number in range(20):
        growth.want(HOST, str(number))
    stuck = []
    while build := begin_all(growth):
        for one in build:
            growth.overdue(one)
        stuck += build
        assert len(stuck) < 50
    assert growth.num_unbuilt == 0 or growth.num_slow == growth.num_building
    most = len(stuck)
    for one in stuck:
        assert growth.end(one) is None
    assert most <= 22
    assert begin_all(growth), "those that were given up for lost are built for again"


def test_a_cancelled_acquires_build_serves_the_next_one() -> None:
    growth: Growth[str] = Growth(2)
    growth.want(HOST, "a")
    (build,) = begin_all(growth)
    growth.leave(HOST, "a")
    growth.want(HOST, "b")
    assert build.client == "b"
    assert growth.next_wanted() is None


def test_after_a_failure_nothing_is_built_before_the_pause_is_over() -> None:
    growth: Growth[str] = Growth(2)
    growth.want(HOST, "a")
    (build,) = begin_all(growth)
    assert growth.end(build) == "a"
    assert growth.next_wanted() is None
    assert growth.first(HOST) == "a", "a jail that comes from elsewhere is taken all the same"
    growth.want_again(HOST, "a")
    growth.want_again(HOST, "a")
    assert len(begin_all(growth)) == 1


steps = st.lists(
    st.tuples(
        st.sampled_from(["want", "leave", "begin", "store", "succeed", "fail", "slow", "again"]), st.integers(0, 30)
    ),
    max_size=120,
)


@given(steps)
def test_whatever_happens_everybody_is_built_for_paused_or_in_line(moves: list[tuple[str, int]]) -> None:
    growth: Growth[int] = Growth(3)
    lacking: dict[int, JailKey] = {}
    paused: set[int] = set()
    builds: list[Build[int]] = []
    number = 0
    for move, value in moves:
        key = (HOST, OTHER)[value % 2]
        if move == "want":
            growth.want(key, number)
            lacking[number] = key
            number += 1
        elif move == "leave" and lacking:
            client = sorted(lacking)[value % len(lacking)]
            growth.leave(lacking.pop(client), client)
            paused.discard(client)
        elif move == "begin" and (wanted := growth.next_wanted()) is not None:
            builds.append(growth.begin(wanted))
            assert builds[-1].client in lacking
        elif move == "store" and growth.may_store:
            builds.append(growth.begin(key))
        elif move == "slow" and builds:
            growth.overdue(builds[value % len(builds)])
        elif move == "again" and paused:
            client = sorted(paused)[value % len(paused)]
            paused.remove(client)
            growth.want_again(lacking[client], client)
        elif move in ("succeed", "fail") and builds:
            build = builds.pop(value % len(builds))
            client = growth.end(build)
            if move == "succeed":
                first = growth.first(build.key)
                expected = [one for one, kind in lacking.items() if kind == build.key]
                assert first == (expected[0] if expected else None)
                if first is not None:
                    growth.leave(lacking.pop(first), first)
                    paused.discard(first)
                if client is not None:
                    growth.want_again(build.key, client)
            elif client is not None:
                paused.add(client)
        served = [build.client for build in builds if build.client is not None]
        assert len(served) == len(set(served)), "two builds for one"
        assert set(served) <= set(lacking)
        assert not set(served) & paused
        assert growth.num_building == len(builds)
        assert growth.num_slow == sum(build.slow for build in builds)
        assert growth.num_lacking == len(lacking)
        in_line = len(lacking) - len(served) - len(paused)
        if growth.num_slow <= 3:
            assert growth.num_unbuilt == in_line
        assert growth.num_building - growth.num_slow <= 3


def test_the_jail_used_last_is_taken_first_and_the_oldest_gives_way() -> None:
    shelf, jails = Shelf(), [FakeJail(number, HOST) for number in range(3)]
    for number, jail in enumerate(jails):
        shelf.put(HOST, jail, float(number))
    shelf.put(OTHER, FakeJail(9, OTHER), 3.0)
    assert (len(shelf), shelf.count(HOST), shelf.count(OTHER)) == (4, 3, 1)
    assert shelf.take_oldest() == (HOST, jails[0])
    assert shelf.take(HOST) is jails[2]
    assert shelf.remove(jails[1])
    assert not shelf.remove(jails[1])
    assert shelf.take(HOST) is None
    assert len(shelf.take_all()) == 1
    assert shelf.take_oldest() is None


def test_idle_jails_expire_but_for_those_that_are_kept() -> None:
    shelf, jails = Shelf(), [FakeJail(number, HOST) for number in range(4)]
    for number, jail in enumerate(jails):
        shelf.put(HOST, jail, float(number))
    assert shelf.next_expiry_s(10.0, {}) == 10.0
    assert shelf.take_expired(9.9, 10.0, {}) == []
    assert shelf.take_expired(11.0, 10.0, {}) == [(HOST, jails[0]), (HOST, jails[1])]
    assert shelf.take_expired(99.0, 10.0, {HOST: 1}) == [(HOST, jails[2])]
    assert shelf.next_expiry_s(10.0, {HOST: 1}) is None


def test_pauses_double_up_to_a_bound_and_end() -> None:
    backoff = Backoff(0.1, 0.5, 4)
    assert [backoff.pause_s(number) for number in range(1, 6)] == [0.1, 0.2, 0.4, 0.5, None]
    assert Backoff(1.0, 9.0, 0).pause_s(1) is None
    assert Backoff(1.0, 9.0, 10_000).pause_s(9_999) == 9.0


def test_demand_is_remembered_for_one_to_two_windows() -> None:
    demand = Demand(10.0)
    demand.used(HOST, 5, 3.0)
    demand.used(HOST, 2, 4.0)
    assert demand.peak(HOST, 9.0) == 5
    assert demand.peak(HOST, 19.0) == 5
    assert demand.peak(HOST, 20.0) == 0
    demand.forget(25.0)
    assert demand.peak(HOST, 5.0) == 0


@given(st.lists(st.floats(1e-7, 1e4), min_size=1, max_size=200))
def test_quantiles_of_waits_are_at_most_a_fifth_too_high(waits_s: list[float]) -> None:
    histogram = Histogram()
    for wait_s in waits_s:
        histogram.add(wait_s)
    found, ordered = histogram.snapshot(), sorted(waits_s)
    assert found.count == len(waits_s) == sum(count for _, count in found.buckets)
    assert found.max_s == ordered[-1]
    for share, quantile_s in ((0.5, found.p50_s), (0.9, found.p90_s), (0.99, found.p99_s)):
        exact_s = ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)]
        assert exact_s <= quantile_s * (1 + 1e-9)
        assert quantile_s <= max(1.2 * exact_s, 1e-5) or exact_s > 1e3
