"""Killing a leaf is tried again where the kernel refuses it, and is never taken for done while somebody lives."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import anyio
import pytest

from sandbox.cgroup import killing
from sandbox.cgroup.absent import AbsentSet
from sandbox.cgroup.killing import kill_patiently, kill_until_empty, try_kill
from sandbox.errors import SandboxDiedError, SandboxError

pytestmark = pytest.mark.anyio


class Refusing(AbsentSet):
    """Kills nothing, after so many refusals."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)
        self.num_kills = 0

    def kill_leaf(self, leaf: str) -> None:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        self.num_kills += 1


def say(leaf: Path, *, populated: int) -> str:
    (leaf / "cgroup.events").write_text(f"populated {populated}\nfrozen 0\n")
    return str(leaf)


async def test_a_refused_kill_is_tried_until_it_is_said(tmp_path: Path) -> None:
    cgroups = Refusing(errno.EMFILE, errno.ENFILE)
    assert not try_kill(cgroups, str(tmp_path))
    with anyio.fail_after(5):
        await kill_patiently(cgroups, str(tmp_path))
    assert cgroups.num_kills == 1
    cgroups.errors = [errno.EMFILE]
    with anyio.fail_after(4):
        await kill_until_empty(cgroups, say(tmp_path, populated=0))
    assert cgroups.num_kills == 2


async def test_a_leaf_that_is_gone_is_dead(tmp_path: Path) -> None:
    assert try_kill(Refusing(errno.ENODEV), str(tmp_path))
    with pytest.raises(SandboxDiedError):
        await kill_until_empty(Refusing(errno.ENOENT), str(tmp_path))


async def test_what_does_not_die_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killing, "EMPTY_TIMEOUT_S", 0.05)
    with pytest.raises(SandboxError, match="did not end"):
        await kill_until_empty(Refusing(), say(tmp_path, populated=1))
    with pytest.raises(SandboxError, match=os.strerror(errno.EMFILE)):
        await kill_until_empty(Refusing(*[errno.EMFILE] * 1000), str(tmp_path))
