"""Builds of the C code under AddressSanitizer and UndefinedBehaviorSanitizer, and the reports that they leave.

Invariant: a report of any process of a sanitized helper, inside a jail or outside, is a file in its `Reports`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from sandbox.build import NATIVE, STRICT, compile_c, find_compiler
from sandbox.errors import CapabilityError

SOURCES = Path(__file__).with_name("native")
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
FLAGS = (*STRICT, "-O1", "-g", "-fno-omit-frame-pointer", f"-I{NATIVE}", f"-I{SOURCES}", *SANITIZE)
# Static runtimes, for inside a jail the libraries of the host may not be there; the plain way is clang's.
LINKINGS = (("-static-libasan", "-static-libubsan"), ())
_WRAPPED = (
    *("waitpid", "wait4", "execve", "execvp", "dup3", "setrlimit"),
    *("transfer_open_read", "transfer_copy_in", "cgroup_remove"),
)

_COMPLAINT = "rollout: "


class Reports:
    """The folder where sanitizers report."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self) -> str:
        """All words since the last call; empty where nothing was wrong."""
        texts = []
        for path in sorted(self._folder.iterdir()):
            text = path.read_text(errors="replace")
            if not text:
                continue
            os.truncate(path, 0)  # and not removed: live agents hold one of them open
            # A command that was given no stderr complains on the agent's, of its own failures.
            if text := "".join(line for line in text.splitlines(True) if not line.startswith(_COMPLAINT)):
                texts.append(f"{path.name}: {text}")
        return "\n".join(texts)


class Sanitized(NamedTuple):
    """A sanitized helper and where it reports."""

    native: Path
    reports: Reports


def require_sanitizers() -> None:
    """Skips a test where the compiler has no sanitizers (their libraries are a package of their own on some hosts)."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler on this host")
    words = [*compiler.split(), *SANITIZE, "-x", "c", "-", "-o", "/dev/null"]
    done = subprocess.run(words, input="int main(void) { return 0; }", capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"{compiler} has no sanitizers here: {done.stderr.strip()}")


def compile_sanitized(target: Path, sources: Sequence[Path], *flags: str) -> None:
    """Compiles C sources with the sanitizers; fails the test on any warning."""
    try:
        compile_c(target, sources, (*FLAGS, *flags), LINKINGS)
    except CapabilityError as error:
        pytest.fail(str(error))


@contextmanager
def sanitized_native() -> Iterator[Sanitized]:
    """Builds the helper in a folder that every uid can reach; the folder goes at the end."""
    folder = Path(tempfile.mkdtemp(prefix="rollout-sanitized-"))
    try:
        folder.chmod(0o755)
        reports = folder / "reports"
        reports.mkdir()
        reports.chmod(0o777)  # every sandbox has a uid of its own; no sticky bit, for they append to one file
        native = folder / "rollout-native"
        wraps = ",".join(f"--wrap={name}" for name in _WRAPPED)
        sources = [*sorted(NATIVE.glob("*.c")), SOURCES / "reports.c"]
        compile_sanitized(native, sources, f'-DREPORTS_DIR="{reports}"', f"-Wl,{wraps}")
        yield Sanitized(native, Reports(reports))
    finally:
        shutil.rmtree(folder)


@contextmanager
def named_native(native: Path) -> Iterator[None]:
    """Engines that start meanwhile, here or in a child, use that helper."""
    before = os.environ.get("ROLLOUT_NATIVE")
    os.environ["ROLLOUT_NATIVE"] = str(native)
    try:
        yield
    finally:
        if before is None:
            del os.environ["ROLLOUT_NATIVE"]
        else:
            os.environ["ROLLOUT_NATIVE"] = before
