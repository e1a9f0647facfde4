"""swe-rex's local deployment, without isolation: one command, or one in a bash session of its own.

Run with `execute` or `session`.
"""

from __future__ import annotations

import logging
import sys

from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest

from bench.peers.helpers.serving import require, serve_async

_QUIET = logging.getLogger("bench.quiet")


async def _execute(worker: int) -> None:
    deployment = LocalDeployment(logger=_QUIET)
    await deployment.start()
    result = await deployment.runtime.execute(Command(command=["/usr/bin/true"]))
    await deployment.stop()
    require(result.exit_code == 0, result)


async def _session(worker: int) -> None:
    deployment = LocalDeployment(logger=_QUIET)
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    result = await deployment.runtime.run_in_session(BashAction(command="/usr/bin/true", check="silent"))
    await deployment.stop()
    require(result.exit_code == 0, result)


if __name__ == "__main__":
    _QUIET.setLevel(logging.CRITICAL)
    serve_async({"execute": _execute, "session": _session}[sys.argv[1]])
