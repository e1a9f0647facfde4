"""`bench lane`: batches from the engine to the learner, beside pickling and a plain copy.

Owns the choice of paths. Invariant: all paths of one condition carry the same batch, end with its columns in the
consumer's own memory, and are measured in the same rounds.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack

import msgspec
import numpy as np

from bench.lane.data import Columns, arrays_of, group_frame, make_columns, make_groups, packed_frame, split
from bench.lane.paths import BurstPeer, QueuePath, lane_burst, open_lane, open_queue
from bench.records import Measure, claim
from bench.rounds import Batch, Peer, Series, interleave, percentile
from bench.runner import Findings
from rollout.lane.ring import LaneWriter

LANE = "lane"
PACKED = "mp.Queue, packed arrays"
ARRAYS = "mp.Queue, per trajectory"
COPY = "plain copy (ceiling)"
_STALL_MS = 2.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    rounds: int = 10
    slice_s: float = 0.5
    num_large: int = 256
    """Trajectories of the large batch."""
    large_tokens: int = 4531
    """Mean tokens of one of them; with 256 that makes 10.4 MB."""
    num_small: int = 192
    """Trajectories of the small step: the demo's 24 groups of 8."""
    small_tokens: int = 60
    group_size: int = 8
    burst: int = 6


QUICK = Plan(rounds=4, slice_s=0.25)


async def run(quick: bool) -> Findings:
    """Measures with the full plan, or with one of under a minute."""
    return await measure(QUICK if quick else Plan())


async def measure(plan: Plan) -> Findings:
    """Measures by that plan."""
    findings = Findings()
    large = make_columns(plan.num_large, plan.large_tokens)
    small = make_columns(plan.num_small, plan.small_tokens)
    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(open_lane())
        queue = await stack.enter_async_context(open_queue())
        size = f"{large.nbytes / 1e6:.3g} MB"
        packed = f"{size}, packed already"
        await _condition(plan, findings, packed, _packed_peers(plan, writer, queue, large), large.nbytes)
        lists = f"{size}, packed from {plan.num_large} trajectories"
        peers = _list_peers(plan, writer, queue, large, 2)
        await _condition(plan, findings, lists, peers, large.nbytes)
        findings.claims.append(
            claim(
                f"event loop held up while packing {size} into the lane, p99",
                1e3 * statistics.median(peers[0].stall_p99s_s[1:]),
                "ms",
                "<=",
                _STALL_MS,
            )
        )
        step = f"a step of {plan.num_small} trajectories, {len(small.token_ids):,} tokens"
        await _condition(plan, findings, step, _list_peers(plan, writer, queue, small, plan.burst), small.nbytes)
    findings.notes += [
        f"times are per batch, in bursts of up to {plan.burst}, until the consumer process has it in its own memory; "
        "the lane's include both checksums",
        "mp.Queue: multiprocessing.Queue, which pickles numpy arrays; plain copy: within one process",
        "GB/s: 9 bytes per token; its p99 is the lowest round",
        "loop lag: how late a 1 ms heartbeat on the sending loop came, with whatever else the machine did; the claim "
        "leaves out waiting for a CPU that other processes had, and takes the median over rounds",
    ]
    return findings


async def _condition(plan: Plan, findings: Findings, condition: str, peers: list[BurstPeer], nbytes: int) -> None:
    all_peers: list[Peer] = [*peers, _Copy(nbytes)]
    series = await interleave(all_peers, concurrency=1, rounds=plan.rounds, slice_s=plan.slice_s, condition=condition)
    findings.measures += [series[peer.name].measure() for peer in all_peers]
    findings.measures += [_throughput(series[peer.name], nbytes) for peer in all_peers]
    findings.measures += [_lag(peer, condition) for peer in peers]


def _packed_peers(plan: Plan, writer: LaneWriter, queue: QueuePath, columns: Columns) -> list[BurstPeer]:
    whole = (columns.token_ids, columns.loss_mask, columns.logprobs)
    parts = split(columns)
    return [
        BurstPeer(LANE, lane_burst(writer, packed_frame(columns)), plan.burst),
        BurstPeer(PACKED, queue.burst(lambda: whole), plan.burst),
        BurstPeer(ARRAYS, queue.burst(lambda: parts), plan.burst),
    ]


def _list_peers(plan: Plan, writer: LaneWriter, queue: QueuePath, columns: Columns, burst: int) -> list[BurstPeer]:
    groups = make_groups(columns, plan.group_size)
    return [
        BurstPeer(LANE, lane_burst(writer, group_frame(groups)), burst),
        BurstPeer(ARRAYS, queue.burst(lambda: arrays_of(groups)), burst),
    ]


class _Copy:
    """Copies as many bytes from here to there."""

    name = COPY

    def __init__(self, nbytes: int) -> None:
        self._source = np.ones(nbytes, np.uint8)
        self._target = np.zeros(nbytes, np.uint8)

    async def batch(self, concurrency: int, slice_s: float) -> Batch:
        """Copies until a fifth of the slice is over; needs no more, for it varies little."""
        samples_s: list[float] = []
        began = time.perf_counter()
        while not samples_s or time.perf_counter() - began < slice_s / 5:
            start = time.perf_counter()
            np.copyto(self._target, self._source)
            samples_s.append(time.perf_counter() - start)
        return Batch(samples_s=samples_s, wall_s=time.perf_counter() - began)


def _throughput(series: Series, nbytes: int) -> Measure:
    rates = [nbytes * rate / 1e9 for rate in series.rates]
    return Measure(
        name=series.name,
        condition=series.condition,
        unit="GB/s",
        p50=statistics.median(rates),
        p99=min(rates),
        per_second=None,
        n=len(rates),
    )


def _lag(peer: BurstPeer, condition: str) -> Measure:
    return Measure(
        name=f"{peer.name}: loop lag",
        condition=condition,
        unit="ms",
        p50=1e3 * statistics.median(peer.lags_s),
        p99=1e3 * percentile(peer.lags_s, 0.99),
        per_second=None,
        n=len(peer.lags_s),
    )
