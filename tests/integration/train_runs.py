"""Starts small training runs as processes, and finds what they hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from rollout.cli.census import KINDS

MARK = "ROLLOUT_TEST_MARK"

TINY = """
name = "tiny"
[tasks]
num_heldout = 8
heldout_samples = 1
[sandbox]
state_dir = "{state_dir}"
[learner]
threads = 1
checkpoint_every = 1
checkpoint_every_sft = 10
[learner.sft]
steps = {sft_steps}
batch_size = 16
[learner.rl]
steps = {rl_steps}
[engine]
group_size = 2
groups_per_batch = 3
max_staleness = 1
max_tokens = 56
max_context_tokens = 80
"""


def write_config(folder: Path, *, sft_steps: int = 20, rl_steps: int = 3, state_dir: Path) -> Path:
    """A run of a few seconds."""
    path = folder / "tiny.toml"
    path.write_text(TINY.format(state_dir=state_dir, sft_steps=sft_steps, rl_steps=rl_steps))
    return path


def start_train(*arguments: str | Path, mark: str) -> subprocess.Popen[bytes]:
    """`rollout train ARGUMENTS --json` in a process that carries `mark` in its environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "rollout.cli.main", "train", *map(str, arguments), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )


def processes_of(mark: str) -> dict[str, int]:
    """Pids of the run's processes, by role: engine, server, learner, warden (sandboxes: see the census)."""
    found: dict[str, int] = {}
    needle = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if needle not in (entry / "environ").read_bytes():
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found[_role(words)] = int(entry.name)
    return found


def _role(words: list[bytes]) -> str:
    for word, role in (
        (b"rollout.cli.main", "engine"),
        (b"learner.serve", "server"),
        (b"learner.train", "learner"),
        (b"warden", "warden"),
    ):
        if word in words:
            return role
    return b" ".join(words).decode(errors="replace")


def census(state_dir: Path) -> dict[str, object]:
    """Leftovers by kind, as `rollout census` counts them; empty when there are none."""
    result = subprocess.run(
        [sys.executable, "-m", "rollout.cli.main", "census", "--state-dir", str(state_dir), "--json"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    kinds = msgspec.json.decode(result.stdout)
    return {kind: found for kind, found in kinds.items() if found and kind in KINDS}


def memfds(mark: str) -> int:
    """Shared-memory files of lanes and weights held by the run's processes or by anything they left to init."""
    count = 0
    run = {str(pid) for pid in processes_of(mark).values()}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            orphaned = (entry / "stat").read_text().rsplit(")", 1)[1].split()[1] == "1"
            if entry.name in run or orphaned:
                count += sum("memfd:rollout" in os.readlink(fd) for fd in (entry / "fd").iterdir())
        except OSError:
            continue
    return count


def mounts() -> int:
    """Mounts of this machine, as we see them."""
    return len(Path("/proc/self/mounts").read_text().splitlines())
