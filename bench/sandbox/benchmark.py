"""`bench sandbox`: what a sandbox costs, beside what other ways of running a program cost.

Owns the choice of peers and the claims. Invariant: every peer runs the same program to its end and all of them
are measured in the same rounds; a peer that this host does not have is a skipped row, never a missing one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import anyio.to_thread
import msgspec

from bench.peers.ours import cold, in_live, live
from bench.peers.programs import PROGRAM, bwrap_argv, nsjail_argv, open_raw_clone, run_bare, run_blocking
from bench.records import CannotMeasure, Claim, Skipped, claim
from bench.rounds import Async, Operation, Peer, Series, interleave, percentile, ratio
from bench.runner import Findings
from bench.sandbox import resident
from sandbox.errors import CapabilityError
from sandbox.estate.stage import stage_tool
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import GIB, MIB

BARE = "bare asyncio subprocess"
THREAD = "bare subprocess.run in a thread"
BWRAP = "one-shot bwrap --unshare-all"
NSJAIL = "one-shot nsjail"
CREATE = "ours: create, command, close"
FIRST = "ours: create to first result"
LIVE = "ours: command in a live sandbox"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    concurrencies: tuple[int, ...] = (1, 16, 64)
    rounds: int = 12
    slice_s: float = 0.5
    """Of one peer in one round."""
    budget_s: float = 60.0
    """Of one concurrency, after which no new round begins."""
    resident_bytes: int = 4 * GIB
    resident_rounds: int = 8
    state_dir: str | None = None


QUICK = Plan(rounds=3, slice_s=0.25, budget_s=8.0, resident_bytes=512 * MIB, resident_rounds=3)


async def run(quick: bool) -> Findings:
    """Measures with the full plan, or with one of under a minute."""
    return await measure(QUICK if quick else Plan())


async def measure(plan: Plan) -> Findings:
    """Measures by that plan.

    Raises:
        CannotMeasure, CapabilityError: this host cannot isolate.
    """
    findings = Findings()
    alone: dict[str, Series] = {}
    async with AsyncExitStack() as stack:
        config = SandboxConfig(state_dir=plan.state_dir)
        host = await stack.enter_async_context(SandboxHost.start(config))
        others = await _outside_peers(stack, host, findings.skipped)
        for concurrency in plan.concurrencies:
            async with live(host, concurrency) as boxes:
                peers = [*others, Async(CREATE, cold(host)), Async(LIVE, in_live(boxes))]
                series = await interleave(
                    peers,
                    concurrency=concurrency,
                    rounds=plan.rounds,
                    slice_s=plan.slice_s,
                    budget_s=plan.budget_s,
                )
            series[FIRST] = series[CREATE].inner(FIRST)
            findings.measures += [series[peer.name].measure() for peer in others]
            findings.measures += [series[name].measure(rate=name != FIRST) for name in (CREATE, FIRST, LIVE)]
            alone = series if concurrency == 1 else alone
        grown = await resident.measure(plan.state_dir, plan.resident_bytes, plan.resident_rounds, plan.slice_s)
    if alone:
        findings.claims += _claims(alone)
    findings.measures += grown.measures
    findings.skipped += grown.skipped
    findings.claims += grown.claims
    findings.notes += [
        f"all run {PROGRAM} with both outputs collected; rows of one condition come from the same rounds",
        "p50: median over rounds of each round's median; p99: of all samples; claims of the form A / B: median over "
        "rounds of the quotient of medians",
        "raw clone: seven namespaces and exec, from a small helper; no mounts, no uid map, no filter",
        "at concurrency N, commands in live sandboxes run in N sandboxes, one after the other in each",
        *grown.notes,
    ]
    return findings


async def _outside_peers(stack: AsyncExitStack, host: SandboxHost, skipped: list[Skipped]) -> list[Peer]:
    """The peers that are not ours, each tried once."""
    clone = await stack.enter_async_context(open_raw_clone())
    peers: list[Peer] = [clone, Async(BARE, _bare((PROGRAM,))), Async(THREAD, _threaded)]
    for name, jail, make in ((BWRAP, "bubblewrap", bwrap_argv), (NSJAIL, "nsjail", nsjail_argv)):
        try:
            tool = await anyio.to_thread.run_sync(stage_tool, host.state_dir, jail)
        except CapabilityError as error:
            skipped.append(Skipped(name=name, reason=str(error)))
        else:
            peers.append(Async(name, _bare(make(tool, host.state_dir))))
    usable = []
    for peer in peers:
        try:
            await peer.batch(1, 0.0)
        except* CannotMeasure as errors:
            skipped.append(Skipped(name=peer.name, reason=str(errors.exceptions[0])))
        else:
            usable.append(peer)
    return usable


def _bare(argv: Sequence[str]) -> Operation:
    async def operate(worker: int) -> None:
        await run_bare(argv)

    return operate


async def _threaded(worker: int) -> None:
    await anyio.to_thread.run_sync(run_blocking, (PROGRAM,))


def _claims(alone: dict[str, Series]) -> list[Claim]:
    """The claims about one sandbox at a time."""
    first = alone[FIRST]
    bwrap = ratio(first, alone[BWRAP]) if BWRAP in alone else None
    return [
        claim("command in a live sandbox / bare asyncio subprocess", ratio(alone[LIVE], alone[BARE]), "x", "<=", 1.2),
        claim("create to first result / one-shot bwrap, p50", bwrap, "x", "<=", 1.5),
        claim("create to first result, p99", 1e3 * percentile(first.samples_s, 0.99), "ms", "<", 100),
    ]
