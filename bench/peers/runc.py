"""runc as a peer: a container for each command, with the configuration that `runc spec` makes.

Owns a bundle for each worker and runc's state, in a temporary folder. Invariant: on leaving, no container, cgroup or
file is left.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from bench.peers.cache import call
from bench.peers.containers import cgroup_name, scratch_folder, small_tree, sweep_cgroups
from bench.peers.debian import Tools
from bench.peers.helper import HelperPeer, open_helper
from bench.peers.programs import PROGRAM

NAME = "runc run"
_CALL_S = 30.0


@asynccontextmanager
async def open_runc(tools: Tools, num_workers: int) -> AsyncIterator[HelperPeer]:
    """The peer, for batches of at most that concurrency.

    Raises:
        CannotMeasure: there is no usable runc.
    """
    runc = tools.program("runc")
    async with scratch_folder("runc") as folder:
        try:
            await anyio.to_thread.run_sync(_make_bundles, runc, tools, folder, num_workers)
            words = ("--root", f"{folder}/state", "run", "--bundle", f"{folder}/{{worker}}", "bench-{worker}")
            async with open_helper(NAME, "commands", str(runc), *words, env=tools.env) as peer:
                yield peer
        finally:
            with anyio.CancelScope(shield=True):
                await sweep_cgroups()


def _make_bundles(runc: Path, tools: Tools, folder: Path, num_workers: int) -> None:
    (folder / "root").mkdir()
    small_tree(folder / "root")
    rootless = ("--rootless",) if os.geteuid() else ()
    call((runc, "spec", *rootless), cwd=folder, env=tools.env, timeout_s=_CALL_S)
    config: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    config["process"] |= {"terminal": False, "args": [PROGRAM]}
    config["root"]["path"] = str(folder / "root")
    for worker in range(num_workers):
        if not rootless:
            config["linux"]["cgroupsPath"] = f"/{cgroup_name('runc')}/{worker}"
        (folder / str(worker)).mkdir()
        (folder / str(worker) / "config.json").write_bytes(msgspec.json.encode(config))
