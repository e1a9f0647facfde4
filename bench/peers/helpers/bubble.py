"""bubble-sandbox: a bubblewrap for each command, in a virtual environment and a workspace of its own.

Run with the folder of its environments, which holds one named `bench`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bubble_sandbox.config import Config
from bubble_sandbox.sandbox import BwrapSandbox

from bench.peers.helpers.serving import require, serve_async


def main() -> None:
    """Serves one command in a new sandbox."""
    sandbox = BwrapSandbox(default_environment="bench", config=Config(environments_pathname=sys.argv[1]))

    async def operate(worker: int) -> None:
        with tempfile.TemporaryDirectory() as workspace:
            result = await sandbox.execute(command=["/usr/bin/true"], workdir=Path(workspace))
        require(result.exit_code == 0, result)

    serve_async(operate)


if __name__ == "__main__":
    main()
