"""The sandbox tests' other user: without privileges, with a state directory of its own."""

from __future__ import annotations

import os
import shutil
import site
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import JAIL_NAMES, JailName
from tests.sandbox.jails import installed

UNPRIVILEGED_UID = 12_345
REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(params=JAIL_NAMES)
def jail(request: pytest.FixtureRequest) -> JailName:
    """Each jail tool in turn: what holds in a sandbox does not depend on it."""
    return installed(request.param)


@pytest.fixture(scope="session")
def unprivileged(state_dir: Path) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """Words that start a Python without privileges, its environment, and a state directory of that user's own.

    Root becomes another user; another user stays what it is. The interpreter is the toolchain image's, since the one
    that runs the tests may lie in a closed home directory.
    """
    own = Path(tempfile.mkdtemp(prefix="rollout-unprivileged-"))
    own.chmod(0o755)
    become = []
    if os.geteuid() == 0:
        os.chown(own, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        become = ["setpriv", f"--reuid={UNPRIVILEGED_UID}", f"--regid={UNPRIVILEGED_UID}", "--clear-groups"]
    python = (state_dir / "images" / "python").resolve() / "bin" / "python3"
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(own),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *site.getsitepackages()]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    yield [*become, str(python)], env, own
    shutil.rmtree(own)


@pytest.fixture
async def host(state_dir: Path) -> AsyncIterator[SandboxHost]:
    """An engine's sandboxes, on the shared state directory."""
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        yield host
