"""The sandbox tests' other user (without privileges, with a state directory of its own), and their helper's build."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox.host import SandboxConfig, SandboxHost
from sandbox.types import JAIL_NAMES, JailName
from tests.sandbox.sanitizers import Sanitized, named_native, require_sanitizers, sanitized_native
from tests.sandbox.tools import installed

UNPRIVILEGED_UID = 12_000 + os.getpid() % 10_000
"""Of this session's own: two of them on one host do not take each other's processes for their own."""
REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(params=JAIL_NAMES)
def jail(request: pytest.FixtureRequest) -> JailName:
    """Each jail tool in turn: what holds in a sandbox does not depend on it."""
    return installed(request.param)


@pytest.fixture(scope="session")
def sanitized() -> Iterator[Sanitized]:
    """The C helper, built once with the sanitizers."""
    require_sanitizers()
    with sanitized_native() as built:
        yield built


@pytest.fixture(scope="session")
def chosen_native(request: pytest.FixtureRequest) -> Iterator[Sanitized | None]:
    """The helper of `--native`, in use for the whole session."""
    if request.config.getoption("--native") == "plain":
        yield None
        return
    built: Sanitized = request.getfixturevalue("sanitized")
    with named_native(built.native):
        yield built


@pytest.fixture(autouse=True)
def no_reports(chosen_native: Sanitized | None) -> Iterator[None]:
    """A sanitizer's report fails the test that caused it (or, of a process that ends late, the next one)."""
    yield
    if chosen_native is not None and (words := chosen_native.reports.take()):
        pytest.fail(words)


@pytest.fixture(scope="session")
def unprivileged(chosen_native: Sanitized | None) -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """Words that start a Python without privileges, its environment, and a state directory of that user's own.

    Root becomes another user, for whom `tests/as-unprivileged` opens the way to checkout and interpreter; another
    user stays what it is.
    """
    own = Path(tempfile.mkdtemp(prefix="rollout-unprivileged-"))
    own.chmod(0o755)
    become = []
    if os.geteuid() == 0:
        os.chown(own, UNPRIVILEGED_UID, UNPRIVILEGED_UID)
        become = [str(REPOSITORY / "tests" / "as-unprivileged"), str(UNPRIVILEGED_UID)]
    env = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(own),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *(entry for entry in sys.path if entry.endswith("-packages"))]),
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"ROLLOUT_NATIVE": native} if (native := os.environ.get("ROLLOUT_NATIVE")) else {}),
    }
    yield [*become, sys.executable], env, own
    shutil.rmtree(own)


@pytest.fixture
async def host(state_dir: Path) -> AsyncIterator[SandboxHost]:
    """An engine's sandboxes, on the shared state directory."""
    async with SandboxHost.start(SandboxConfig(state_dir=str(state_dir))) as host:
        yield host
