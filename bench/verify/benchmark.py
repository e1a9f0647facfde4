"""`bench verify`: verdicts per second through the verifier, beside an interpreter per verdict without any sandbox.

Owns the choice of subjects. Invariant: every verdict is compared with the one that is due; one wrong or invalid verdict
and there are no figures.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from bench.records import CannotMeasure
from bench.rounds import Async, Operation, Peer, interleave
from bench.runner import Findings
from bench.verify.items import Item, Turns, code_items, demo_items
from rollout.types import Reward
from rollout.verify.config import VerifierConfig
from rollout.verify.verifier import Verifier
from sandbox.estate.state import default_state_dir, open_state_dir
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.images.python import build_python_image

_INTERPRETER = os.path.realpath(sys.executable)
_FLAGS = ("-S", "-s", "-P", "-B", "-c")
"""As the verifier's own guests."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is measured."""

    concurrencies: tuple[int, ...] = (1, 4, 8)
    rounds: int = 8
    slice_s: float = 1.0
    num_demo_tasks: int = 32
    state_dir: str | None = None


QUICK = Plan(rounds=3, slice_s=0.5)


async def run(quick: bool) -> Findings:
    """Measures with the full plan, or with one of under a minute."""
    return await measure(QUICK if quick else Plan())


async def measure(plan: Plan) -> Findings:
    """Measures by that plan; builds the toolchain image where the state directory has none.

    Raises:
        CannotMeasure: a verdict was not the one that is due.
    """
    findings = Findings()
    chosen = Path(plan.state_dir) if plan.state_dir else default_state_dir()
    state_dir = await anyio.to_thread.run_sync(open_state_dir, chosen)
    await anyio.to_thread.run_sync(build_python_image, state_dir)
    demo, code = demo_items(plan.num_demo_tasks), code_items()
    settings = VerifierConfig(concurrency=max(plan.concurrencies), retries=0)
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host, Verifier(host, settings) as verifier:
        peers: list[Peer] = [
            Async("demo: verifier", _judged(verifier, Turns(demo))),
            Async("demo: bare python3 -c", _bare(Turns(demo))),
            Async("code: verifier", _judged(verifier, Turns(code))),
            Async("code: bare python3 -c", _bare(Turns(code))),
        ]
        for concurrency in plan.concurrencies:
            series = await interleave(peers, concurrency=concurrency, rounds=plan.rounds, slice_s=plan.slice_s)
            findings.measures += [series[peer.name].measure() for peer in peers]
    findings.notes += [
        "demo: nine inputs compared as plain data; code: check(candidate) with seven assertions, as HumanEval's; every "
        "second submission is wrong",
        "verifier: a fresh sandbox per verdict, the tests never in it; bare: an unsandboxed interpreter that runs "
        "submission and tests together, a floor that nobody should train on",
    ]
    return findings


def _judged(verifier: Verifier, turns: Turns) -> Operation:
    async def operate(worker: int) -> None:
        item = turns.take()
        verdict = await verifier.verify(item.task, item.submission)
        if verdict.reward != Reward(item.reward):
            raise CannotMeasure(f"{item.task.id} should earn {item.reward}, the verdict is {verdict}")

    return operate


def _bare(turns: Turns) -> Operation:
    async def operate(worker: int) -> None:
        item = turns.take()
        passed = await passes(item)
        if passed != (item.reward == 1.0):
            raise CannotMeasure(f"the bare program of {item.task.id} {'passed' if passed else 'failed'}")

    return operate


async def passes(item: Item) -> bool:
    """Whether the item's bare program exits with 0."""
    process = await asyncio.create_subprocess_exec(
        *(_INTERPRETER, *_FLAGS, item.bare),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return await process.wait() == 0
