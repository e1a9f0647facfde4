"""`bench pool`: what an isolated command costs from a warm pool, beside one-shot sandboxes and containers.

Owns the choice of peers and the claims. Invariant: every peer runs the same program to its end and all of them are
measured in the same rounds; a peer that this host does not have, or that fails, is a skipped row, never a missing one.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec

from bench.peers.ours import cold
from bench.peers.packages import PACKAGES
from bench.peers.programs import PROGRAM
from bench.pool.bases import seal_base
from bench.pool.outside import BWRAP, BWRAP_LOOP, open_outside
from bench.pool.recycled import ACQUIRE, RECYCLED, SPARE, WarmAcquire, open_recycled
from bench.records import Claim, Skipped, claim
from bench.rounds import Async, Peer, Series, interleave, rate_ratio
from bench.runner import Findings
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.pool.statistics import PoolStatistics

COLD = "ours, cold: create, command, close"
WARM = "ours: warm acquire"
ATTACHED = "ours: warm acquire, base attached"
NEW = "ours: warm acquire, new base"
_TIMES_BWRAP = 5.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    concurrencies: tuple[int, ...] = (1, 16, 64)
    rounds: int = 8
    slice_s: float = 0.5
    """Of one peer in one round."""
    budget_s: float = 75.0
    """Of one concurrency, after which no new round begins."""
    patience_s: float = 6.0
    """For one operation of each worker; above one worker, slower peers do not take part."""
    num_files: int = 1000
    """In each base."""
    may_obtain: bool = True
    """Whether peers that are not here yet are downloaded."""
    state_dir: str | None = None


QUICK = Plan(concurrencies=(1, 64), rounds=3, slice_s=0.2, budget_s=6.0, patience_s=1.5, may_obtain=False)


async def run(quick: bool) -> Findings:
    """Measures with the full plan, or with one of under a minute."""
    return await measure(QUICK if quick else Plan())


async def measure(plan: Plan) -> Findings:
    """Measures by that plan.

    Raises:
        CannotMeasure, CapabilityError: this host cannot isolate.
    """
    findings = Findings()
    skipped, largest = findings.skipped, max(plan.concurrencies)
    async with SandboxHost.start(SandboxConfig(state_dir=plan.state_dir)) as host:
        outside_peers = open_outside(host.state_dir, largest, may_obtain=plan.may_obtain, skipped=skipped)
        async with outside_peers as outside:
            for concurrency in plan.concurrencies:
                others = outside.at(concurrency, plan.patience_s, skipped)
                async with AsyncExitStack() as stack:
                    recycled = await stack.enter_async_context(open_recycled(host, concurrency + SPARE))
                    ours: list[Peer] = [Async(COLD, cold(host)), recycled]
                    if concurrency == 1:
                        ours += await _warm_peers(stack, host, plan.num_files)
                    series = await _condition(plan, concurrency, ours, others, skipped)
                    findings.notes.append(_account(concurrency, recycled.account()))
                findings.measures += [
                    one.measure(rate=one.name not in (ACQUIRE, WARM, ATTACHED, NEW)) for one in series.values()
                ]
                if concurrency == 1:
                    findings.claims += _acquire_claims(series)
                if concurrency == largest:
                    findings.claims += _rate_claims(series, largest)
    findings.notes += [
        f"all run {PROGRAM}; rows of one concurrency come from the same rounds; p50: median over rounds of each "
        "round's median; p99: of all samples",
        "outside peers are driven by small processes of their own, so that none pays for the engine's size: command "
        "lines by threads with vfork, Python packages by asyncio as their users would; bubblewrap is measured a second "
        "time as a program with an event loop calls it, by asyncio in the process that also calls ours",
        f"bases: sealed workspaces of {plan.num_files:,} files; attached: the jail had the same base before; new: "
        "another one; where a base cannot lie under a workspace it is copied"
        + (f" (so here: {copied})" if (copied := host.layers.why_copied) else ""),
        "docker: an engine started by this benchmark in namespaces of its own, its data in a tmpfs, without network",
        f"PyPI: {', '.join(sorted({package.requirement for package in PACKAGES}))}",
    ]
    return findings


async def _warm_peers(stack: AsyncExitStack, host: SandboxHost, num_files: int) -> list[Peer]:
    """Acquires alone; each from a pool of one jail, so that it is known what the jail had before."""
    bases = [await seal_base(host, num_files) for _ in range(2)]
    peers: list[Peer] = []
    for name, turns in ((WARM, [None]), (ATTACHED, bases[:1]), (NEW, bases)):
        peers.append(WarmAcquire(name, await stack.enter_async_context(open_recycled(host, 1)), turns))
    return peers


async def _condition(
    plan: Plan, concurrency: int, ours: list[Peer], others: list[Peer], skipped: list[Skipped]
) -> dict[str, Series]:
    """The rounds at one concurrency; an outside peer that fails in them is a skipped row."""
    lost: dict[str, str] = {}
    series = await interleave(
        ours,
        concurrency=concurrency,
        rounds=plan.rounds,
        slice_s=plan.slice_s,
        budget_s=plan.budget_s,
        others=others,
        lost=lost,
    )
    skipped += [Skipped(name=f"{name} at concurrency {concurrency}", reason=why) for name, why in lost.items()]
    series[ACQUIRE] = series[RECYCLED].inner(ACQUIRE)
    return series


def _acquire_claims(series: dict[str, Series]) -> list[Claim]:
    bounds_ms = {WARM: 0.3, ATTACHED: 0.3, NEW: 5.0}
    return [claim(f"{name}, p50", series[name].measure().p50, "ms", "<=", bound) for name, bound in bounds_ms.items()]


def _rate_claims(series: dict[str, Series], concurrency: int) -> list[Claim]:
    """Against bubblewrap called as we are, and as quickly as it can be."""
    claims = []
    for name in (BWRAP_LOOP, BWRAP):
        times = rate_ratio(series[RECYCLED], series[name]) if name in series else None
        words = f"acquire, command, release / {name}, operations per second at concurrency {concurrency}"
        claims.append(claim(words, times, "x", ">=", _TIMES_BWRAP))
    return claims


def _account(concurrency: int, done: PoolStatistics) -> str:
    return (
        f"concurrency {concurrency}: of {done.acquired:,} leases {done.recycled:,} jails were proven clean and used "
        f"again, {done.unclean:,} were not and destroyed; {done.built:,} jails were built"
    )
