"""Where peers are kept once they have been obtained: nothing of the host is changed, and all of it may be deleted.

Owns `~/.cache/rollout-engine/bench-peers`. Invariant: a folder under its final name is complete; two benchmarks that
want the same thing make it once.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.records import CannotMeasure

MAKING_S = 420.0
"""For one peer to be obtained, from a slow registry too."""
_LOOK_S = 0.2
_READY = ".ready"


def cache_dir() -> Path:
    """The folder, which may not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "rollout-engine" / "bench-peers"


def obtain(name: str, make: Callable[[Path], None], *, may_make: bool, base: Path | None = None) -> Path:
    """The folder of that name, made by `make` (which is given the empty folder) if nobody has yet; blocks.

    Raises:
        CannotMeasure: it is not there and may not be made, or could not be.
    """
    base = base or cache_dir()
    folder = base / re.sub(r"[^\w.=+-]", "_", name)
    if (folder / _READY).exists():
        return folder
    if not may_make:
        raise CannotMeasure("not installed yet; a run without --quick does it, once")
    try:
        base.mkdir(parents=True, exist_ok=True)
        with (base / f"{folder.name}.lock").open("w") as lock:
            _wait_for(lock.fileno())
            if not (folder / _READY).exists():
                print(f"bench: obtaining {name}, once, in {folder}", file=sys.stderr, flush=True)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                (folder / _READY).touch()
    except OSError as error:
        raise CannotMeasure(f"cannot be kept in {folder}: {error.strerror}") from error
    return folder


def _wait_for(lock: int) -> None:
    deadline = time.monotonic() + MAKING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise CannotMeasure(f"another benchmark has been obtaining it for {MAKING_S:.0f} s") from None
            time.sleep(_LOOK_S)
        else:
            return


def call(
    argv: Sequence[str | Path],
    *,
    timeout_s: float = MAKING_S,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Runs a program to its end and returns its output; blocks.

    Raises:
        CannotMeasure: it cannot be run, failed, or took too long; with its last line.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            cwd=cwd, env={**os.environ, **(env or {})}, check=False,
        )  # fmt: skip
    except OSError as error:
        raise CannotMeasure(f"{words[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise CannotMeasure(f"{' '.join(words[:4])} took longer than {timeout_s:.0f} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing"]
        raise CannotMeasure(f"{' '.join(words[:4])} ended with status {done.returncode} and said: {said[-1][-300:]}")
    return done.stdout
