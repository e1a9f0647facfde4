"""The peers of `bench pool` that are not ours.

Owns which there are and how they are opened. Invariant: one that cannot be had, started or tried is a skipped row with
its reason, and everything that was opened is closed with the stack.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from bench.peers import debian, docker, runc
from bench.peers.helper import open_helper
from bench.peers.packages import PACKAGES, Package, environment_of, open_package
from bench.peers.programs import PROGRAM, bwrap_argv, run_bare
from bench.records import CannotMeasure, Skipped
from bench.rounds import Async, Peer, first_words
from sandbox.errors import CapabilityError
from sandbox.estate.stage import stage_tool

BARE = "bare process (no isolation)"
BWRAP = "one-shot bwrap --unshare-all"
BWRAP_LOOP = "one-shot bwrap, from the engine's event loop"
Opening = Callable[[], AbstractAsyncContextManager[Sequence[Peer]]]


class Outside:
    """The peers that could be opened, and how long one operation of each takes."""

    def __init__(self) -> None:
        self._peers: list[tuple[Peer, float]] = []
        self._num_cores = len(os.sched_getaffinity(0))

    async def add(self, peer: Peer) -> None:
        """Tries the peer once.

        Raises:
            CannotMeasure: it does not work.
        """
        await peer.batch(1, 0.0)
        began = time.monotonic()
        await peer.batch(1, 0.0)
        self._peers.append((peer, time.monotonic() - began))

    def at(self, concurrency: int, patience_s: float, skipped: list[Skipped]) -> list[Peer]:
        """Those whose workers would take at most that long for one operation each; names the others in `skipped`."""
        taken = []
        for peer, operation_s in self._peers:
            expected_s = operation_s * concurrency / min(concurrency, self._num_cores)
            if concurrency > 1 and expected_s > patience_s:
                reason = f"one operation of each worker would take about {expected_s:.0f} s"
                skipped.append(Skipped(name=f"{peer.name} at concurrency {concurrency}", reason=reason))
            else:
                taken.append(peer)
        return taken


@asynccontextmanager
async def open_outside(
    state_dir: Path, num_workers: int, *, may_obtain: bool, skipped: list[Skipped]
) -> AsyncIterator[Outside]:
    """Opens every peer that this host can run; those that it has not got yet are obtained only if `may_obtain`."""
    outside = Outside()
    async with AsyncExitStack() as stack:
        folder = Path(await stack.enter_async_context(anyio.TemporaryDirectory(prefix="bench-bin-")))
        try:
            bwrap = await anyio.to_thread.run_sync(stage_tool, state_dir, "bubblewrap")
        except CapabilityError as error:
            skipped.append(Skipped(name=BWRAP, reason=str(error)))
            openings: list[tuple[str, Opening]] = []
        else:
            (folder / "bwrap").symlink_to(bwrap)
            argv = bwrap_argv(bwrap, state_dir)
            openings = [(BWRAP, partial(_command, BWRAP, *argv)), (BWRAP_LOOP, partial(_from_the_loop, argv))]
        openings.insert(0, (BARE, partial(_command, BARE, PROGRAM)))
        openings += [(package.name, partial(_package, package, folder, may_obtain)) for package in PACKAGES]
        openings += [(runc.NAME, partial(_runc, num_workers, may_obtain))]
        openings += [(f"{docker.RUN}, {docker.EXEC}", partial(_docker, may_obtain))]
        for name, opening in openings:
            try:
                for peer in await stack.enter_async_context(opening()):
                    name = peer.name
                    await outside.add(peer)
            except* CannotMeasure as errors:
                skipped.append(Skipped(name=name, reason=first_words(errors)))
        yield outside


@asynccontextmanager
async def _from_the_loop(argv: Sequence[str]) -> AsyncIterator[Sequence[Peer]]:
    """As a program with an event loop would call it, ours for one: asyncio forks the whole process."""

    async def operate(worker: int) -> None:
        await run_bare(argv)

    yield [Async(BWRAP_LOOP, operate)]


@asynccontextmanager
async def _command(name: str, *argv: str) -> AsyncIterator[Sequence[Peer]]:
    async with open_helper(name, "commands", *argv) as peer:
        yield [peer]


@asynccontextmanager
async def _package(package: Package, bin_dir: Path, may_obtain: bool) -> AsyncIterator[Sequence[Peer]]:
    if package.needs_bwrap and not (bin_dir / "bwrap").exists():
        raise CannotMeasure("needs bubblewrap, which is not here")
    environment = await anyio.to_thread.run_sync(partial(environment_of, package, may_make=may_obtain))
    async with open_package(package, bin_dir, environment) as peer:
        yield [peer]


@asynccontextmanager
async def _runc(num_workers: int, may_obtain: bool) -> AsyncIterator[Sequence[Peer]]:
    tools = await anyio.to_thread.run_sync(partial(debian.tools, debian.RUNC, may_make=may_obtain))
    async with runc.open_runc(tools, num_workers) as peer:
        yield [peer]


@asynccontextmanager
async def _docker(may_obtain: bool) -> AsyncIterator[Sequence[Peer]]:
    tools = await anyio.to_thread.run_sync(partial(debian.tools, debian.DOCKER, may_make=may_obtain))
    async with docker.open_docker(tools) as peers:
        yield peers
