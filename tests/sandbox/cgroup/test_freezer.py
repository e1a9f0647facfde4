"""Freezing on plain files: whoever comes late, or is cancelled, leaves the directory to the next tenant as it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest

from sandbox.cgroup.freezer import Freezer
from sandbox.errors import SandboxDiedError
from tests.sandbox.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Never stands still, as far as its events tell."""
    place = tmp_path / "s0"
    place.mkdir()
    (place / "cgroup.freeze").write_text("0")
    (place / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    return place


async def test_a_freeze_that_outlasts_its_sandbox_never_touches_the_next_tenant(directory: Path) -> None:
    freezer = Freezer(str(directory))
    failed = []

    async def freeze() -> None:
        with pytest.raises(SandboxDiedError):
            await freezer.freeze()
        failed.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(freeze)
        group.start_soon(freeze)  # waits for its turn
        await until(lambda: freezer.frozen)
        freezer.end()
        assert (directory / "cgroup.freeze").read_text() == "0"
        (directory / "cgroup.freeze").write_text("the next tenant's")
    assert failed == [True, True]
    with pytest.raises(SandboxDiedError):
        await freezer.freeze()
    await freezer.thaw()
    assert (directory / "cgroup.freeze").read_text() == "the next tenant's"
    assert not freezer.frozen


async def test_a_cancelled_freeze_stays_cancelled_where_the_directory_has_vanished(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freezer = Freezer(str(directory))
    with anyio.CancelScope() as scope:

        def is_still() -> bool:
            shutil.rmtree(directory)
            scope.cancel()
            return False

        monkeypatch.setattr(freezer, "_is_still", is_still)
        await freezer.freeze()
    assert scope.cancelled_caught
    assert not freezer.frozen
