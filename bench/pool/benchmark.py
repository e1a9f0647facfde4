"""`bench pool`: what an isolated command costs from a warm pool, beside one-shot sandboxes and containers.

Owns the choice of peers and the claims. Invariant: every peer runs the same program to its end and all of them are
measured in the same rounds; a peer that this host does not have, or that fails, is a skipped row, never a missing one.
"""

from __future__ import annotations

import msgspec

from bench.peers.ours import cold
from bench.peers.packages import PACKAGES
from bench.peers.programs import PROGRAM
from bench.pool.outside import BWRAP, open_outside
from bench.records import Claim, Skipped, claim
from bench.rounds import Async, Peer, Series, interleave, rate_ratio
from bench.runner import Findings
from sandbox.host import SandboxConfig, SandboxHost

COLD = "ours, cold: create, command, close"
_TIMES_BWRAP = 5.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    concurrencies: tuple[int, ...] = (1, 16, 64)
    rounds: int = 8
    slice_s: float = 0.4
    """Of one peer in one round."""
    budget_s: float = 60.0
    """Of one concurrency, after which no new round begins."""
    may_obtain: bool = True
    """Whether peers that are not here yet are downloaded."""
    state_dir: str | None = None


QUICK = Plan(concurrencies=(1, 64), rounds=3, slice_s=0.25, budget_s=10.0, may_obtain=False)


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
                ours: list[Peer] = [Async(COLD, cold(host))]
                lost: dict[str, str] = {}
                series = await interleave(
                    ours,
                    concurrency=concurrency,
                    rounds=plan.rounds,
                    slice_s=plan.slice_s,
                    budget_s=plan.budget_s,
                    others=outside.at(concurrency, skipped),
                    lost=lost,
                )
                findings.measures += [one.measure() for one in series.values()]
                failed = f"at concurrency {concurrency}"
                skipped += [Skipped(name=f"{name} {failed}", reason=reason) for name, reason in lost.items()]
    findings.claims += _claims(series, largest)
    findings.notes += [
        f"all run {PROGRAM}; rows of one concurrency come from the same rounds; p50: median over rounds of each "
        "round's median; p99: of all samples",
        "outside peers are driven by small processes of their own, so that none pays for the engine's size; command "
        "lines by threads with vfork, Python packages by asyncio as their users would",
        "docker: an engine started by this benchmark in namespaces of its own, its data in a tmpfs, without network",
        f"PyPI: {', '.join(sorted({package.requirement for package in PACKAGES}))}",
    ]
    return findings


def _claims(series: dict[str, Series], concurrency: int) -> list[Claim]:
    """The claims about the largest concurrency."""
    times = rate_ratio(series[COLD], series[BWRAP]) if BWRAP in series else None
    name = f"acquire, command, release / one-shot bwrap, operations per second at concurrency {concurrency}"
    return [claim(name, times, "x", ">=", _TIMES_BWRAP)]
