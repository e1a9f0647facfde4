"""An engine that forks without exec, as trainers do, while sandboxes run, stand still, read and start.

Usage: forking_engine.py STATE_DIR JAIL MARK HOW; every process inside is a `sleep MARK`. HOW says what the child does:

outlive  it waits, and so does its parent, to be killed; `outlive-raw` is a fork that runs no hooks
collect  it throws everything away, closes what it can reach, and exits; its parent then looks whether it was disturbed
worker   the same by `multiprocessing`, started in another thread than the loop's
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial

import anyio

from sandbox.commands.process import Process
from sandbox.host import SandboxConfig, SandboxHost
from sandbox.sandbox import Sandbox
from sandbox.types import Command, SandboxSpec


def raw_fork() -> int:
    """The C library's fork: the interpreter's hooks do not run."""
    return ctypes.PyDLL(None).fork()


def throw_away(host: SandboxHost, boxes: list[Sandbox], processes: list[Process]) -> None:
    """In the child: all that an interpreter's end, or careless code, may do to what it inherited.

    No loop runs here, so what would wait for something fails in its own way.
    """
    steps: list[Callable[[], object]] = []
    for process in processes:
        steps += [partial(process.kill().send, None), process.take_open_streams]
    for box in boxes:
        steps += [partial(box.mark_dead, "a child said so"), box.close, box.end_freeze]
    steps += [partial(host._end().send, None), partial(host._warden.aclose().send, None), host._slot.close, gc.collect]
    for step in steps:
        with suppress(Exception):
            step()


async def main(state_dir: str, jail: str, mark: str, how: str) -> None:
    spec = SandboxSpec(jail=jail)  # type: ignore[arg-type]
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(SandboxHost.start(SandboxConfig(state_dir=state_dir)))
        boxes = [await stack.enter_async_context(host.acquire(spec)) for _ in range(3)]
        sleeping, reading, frozen = boxes
        await sleeping.run(Command(argv=("sh", "-c", f"(setsid sleep {mark} &)")))
        sleeper = await stack.enter_async_context(sleeping.start(Command(argv=("sleep", mark), timeout_s=600)))
        cat = await stack.enter_async_context(reading.start(Command(argv=("cat",)), stdin="pipe", output="stream"))
        still = await stack.enter_async_context(frozen.start(Command(argv=("sleep", mark), timeout_s=600)))
        if host.backend.name != "none":
            await frozen.freeze()
        everything = (host, boxes, [sleeper, cat, still])
        worker = multiprocessing.get_context("fork").Process(target=throw_away, args=everything)
        if how == "worker":
            await anyio.to_thread.run_sync(worker.start)
        child = worker.pid or (raw_fork() if how == "outlive-raw" else os.fork())
        if child == 0:
            if how == "collect":
                throw_away(*everything)
                os._exit(0)
            signal.pause()
        said = {"child": child, "warden": host._warden.pid, "slot": host._slot.number, "roots": host.backend.roots}
        print(json.dumps(said), flush=True)
        if how.startswith("outlive"):
            await anyio.sleep_forever()
        if how == "worker":
            await anyio.to_thread.run_sync(worker.join)
            assert worker.exitcode == 0
        else:
            _, status = await anyio.to_thread.run_sync(os.waitpid, child, 0)
            assert status == 0, status
        assert sleeper.running
        assert still.running
        await cat.write_stdin(b"still here")
        piece = await anext(cat.output())
        assert piece.data == b"still here", piece
        cat.close_stdin()  # a copy of the pipe in another process would keep its reader waiting
        outcome = await cat.wait()
        assert outcome.ok, outcome
        await frozen.thaw()
        for box in boxes:
            assert (await box.run(Command(argv=("true",)))).ok
        async with host.acquire(spec) as fresh:
            assert (await fresh.run(Command(argv=("true",)))).ok
        assert host._slot.record_path.exists()
        print(json.dumps({"undisturbed": True}), flush=True)


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:], backend_options={"use_uvloop": True})
