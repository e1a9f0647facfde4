"""The event loop of an engine's process.

Invariant: what the process holds when the loop begins (modules, above all) is exempt from Python's garbage collector.
A full collection walks everything else that lives, with the loop standing still: tens of milliseconds for the modules
of an engine alone, every few hundred sandboxes.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

import anyio

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


def run_on_loop(main: Callable[[*Arguments], Awaitable[Result]], *arguments: *Arguments) -> Result:
    """Runs it to its end on a loop of uvloop; for a process that is ours, since `gc.freeze` is for the whole of it."""
    gc.collect()
    gc.freeze()
    return anyio.run(main, *arguments, backend="asyncio", backend_options={"use_uvloop": True})
