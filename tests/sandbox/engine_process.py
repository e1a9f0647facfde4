"""An engine to be killed: starts sandboxes with running commands and background children, says so, waits.

Usage: engine_process.py STATE_DIR BACKEND MARK JAIL; every process inside is a `sleep MARK`.
"""

import os
import sys

import anyio

from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import Command, SandboxSpec


async def main(state_dir: str, backend: str, mark: str, jail: str) -> None:
    spec = SandboxSpec(jail=jail)  # type: ignore[arg-type]
    config = SandboxConfig(state_dir=state_dir, cgroup_backend=backend)  # type: ignore[arg-type]
    async with SandboxHost.start(config) as host, anyio.create_task_group() as group:

        async def live(ready: anyio.Event) -> None:
            async with host.acquire(spec) as box:
                await box.run(Command(argv=("sh", "-c", f"(setsid sleep {mark} &) ; sleep {mark} &")))
                async with box.start(Command(argv=("sleep", mark), timeout_s=600)) as process:
                    ready.set()
                    await process.wait()

        events = [anyio.Event() for _ in range(3)]
        for event in events:
            group.start_soon(live, event)
        for event in events:
            await event.wait()
        print(host._warden.pid, *host.backend.roots, flush=True)

        async def churn() -> None:  # sandboxes that are just starting or closing when the end comes
            while True:
                async with host.acquire(spec) as box:
                    await box.run(Command(argv=("true",)))

        group.start_soon(churn)
        group.start_soon(churn)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    anyio.run(main, *sys.argv[1:])
