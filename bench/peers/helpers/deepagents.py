"""deepagents-sandbox: a bubblewrap for each command, in a sandbox with a workspace and limits where cgroup v2 is."""

from __future__ import annotations

import warnings

from deepagents_sandbox import NativeSandbox

from bench.peers.helpers.serving import require, serve_async


async def _operate(worker: int) -> None:
    async with NativeSandbox() as sandbox:
        result = await sandbox.execute("/usr/bin/true")
    require(result.exit_code == 0, result)


def main() -> None:
    """Serves one command in a new sandbox."""
    warnings.simplefilter("ignore")  # it says for each sandbox what the host does not limit
    serve_async(_operate)


if __name__ == "__main__":
    main()
