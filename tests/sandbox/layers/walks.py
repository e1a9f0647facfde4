"""What a workspace really holds, found by a walk inside, to compare with what the engine says about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sandbox.layers.types import Change
from sandbox.sandbox import Sandbox
from sandbox.types import Command

Walk = dict[str, tuple[str, int, int, str, str]]
"""By path: what it is, its mode, size, hash and target."""

WALK = r"""
import hashlib, json, os, stat, sys
top = "/workspace"
found = {}
def look(path):
    full = os.path.join(top, path) if path else top
    info = os.lstat(full)
    mode = stat.S_IMODE(info.st_mode) & 0o1777
    if stat.S_ISLNK(info.st_mode):
        found[path or "."] = ("symlink", 0, 0, "", os.readlink(full))
    elif stat.S_ISDIR(info.st_mode):
        found[path or "."] = ("directory", mode, 0, "", "")
        closed = mode & 0o700 != 0o700
        if closed: os.chmod(full, 0o700)
        for name in os.listdir(full):
            look(f"{path}/{name}" if path else name)
        if closed: os.chmod(full, mode)
    elif stat.S_ISREG(info.st_mode):
        closed = not mode & 0o400
        if closed: os.chmod(full, 0o600)
        data = open(full, "rb").read()
        if closed: os.chmod(full, mode)
        found[path] = ("file", mode, len(data), hashlib.sha256(data).hexdigest(), "")
    else:
        found[path] = ("fifo", 0, 0, "", "")
look("")
json.dump(found, sys.stdout)
"""


async def python(box: Sandbox, text: str, *words: str, output_bytes: int = 1 << 24) -> str:
    """Runs a program inside and returns what it says; fails where it fails."""
    command = Command(argv=("python3", "-c", text, *words), timeout_s=60, output_limit_bytes=output_bytes)
    outcome = await box.run(command)
    assert outcome.ok, (outcome.reason, outcome.exit_code, outcome.stderr[-2000:])
    return outcome.stdout.decode()


async def shell(box: Sandbox, text: str) -> str:
    """The same for a line of shell."""
    outcome = await box.run(Command(argv=("/bin/sh", "-c", text), timeout_s=60))
    assert outcome.ok, (outcome.reason, outcome.exit_code, outcome.stderr[-2000:])
    return outcome.stdout.decode()


async def walk(box: Sandbox) -> Walk:
    """Everything in the workspace."""
    found: dict[str, Any] = json.loads(await python(box, WALK))
    return {path: tuple(facts) for path, facts in found.items()}


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """What `diff` must say, by comparing two walks."""
    changes = []
    for path in {*before, *after}:
        if path not in after:
            changes.append(Change(path=path, kind="deleted", node=before[path][0]))
        elif before.get(path) != after[path]:
            node, mode, size, sha256, target = after[path]
            kind = "changed" if path in before else "created"
            changes.append(
                Change(path=path, kind=kind, node=node, mode=mode, size_bytes=size, sha256=sha256, target=target)
            )
    return sorted(changes, key=lambda change: change.path)
