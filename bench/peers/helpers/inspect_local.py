"""inspect-ai's local sandbox environment: a process in a temporary directory, without isolation."""

from __future__ import annotations

from inspect_ai.util._sandbox.local import LocalSandboxEnvironment

from bench.peers.helpers.serving import require, serve_async


async def _operate(worker: int) -> None:
    boxes = await LocalSandboxEnvironment.sample_init("bench", None, {})
    result = await boxes["default"].exec(["/usr/bin/true"])
    await LocalSandboxEnvironment.sample_cleanup("bench", None, boxes, False)
    require(result.success, result)


if __name__ == "__main__":
    serve_async(_operate)
