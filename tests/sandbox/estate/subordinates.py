"""An account with subordinate ids, in a mount namespace of its own: the host's own files are not changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ENTER = """
set -e
for name in passwd subuid subgid; do
  test -e /etc/$name || touch /etc/$name
  mount --bind "$1/$name" /etc/$name
done
shift
exec "$@"
"""


def enter_with_account(folder: Path, uid: int, home: Path, ranges: str) -> list[str]:
    """Words before a command of root: it sees an account `worker` with that uid, and those subordinate ids."""
    if shutil.which("newuidmap") is None:
        pytest.fail("newuidmap is missing: apt install uidmap (scripts/test does it for root)")
    account = f"worker:x:{uid}:{uid}::{home}:/bin/sh\n"
    (folder / "passwd").write_text(Path("/etc/passwd").read_text() + account)
    for name in ("subuid", "subgid"):
        (folder / name).write_text(ranges)
    return ["unshare", "--mount", "sh", "-c", ENTER, "enter", str(folder)]
