"""Builds the native helper (warden and agent in one static program) with the system's C compiler.

Owns: the cache of built binaries, keyed by a hash of the sources. Invariant: a file under its final name is
complete and belongs to exactly these sources.
A binary that the user names (`$ROLLOUT_NATIVE`) is used unseen: whoever sets it vouches for it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sandbox.errors import CapabilityError, ConfigError

NATIVE = Path(__file__).resolve().parent / "native"
NAME = "rollout-native"
NAMED_BY = "ROLLOUT_NATIVE"
STRICT = ("-std=gnu11", "-Wall", "-Wextra", "-Werror")
FLAGS = (*STRICT, "-O2", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")
# Static, so that it runs in any image; a libc without static archives still serves the host image.
LINKINGS = (("-static",), ())
_BUILD_TIMEOUT_S = 120


def source_hash() -> str:
    """Names a build: sources, flags and machine."""
    digest = hashlib.sha256(" ".join((*FLAGS, platform.machine())).encode())
    for path in sorted(NATIVE.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def cache_dir() -> Path:
    """Where builds are kept: the user's cache directory, or /tmp where there is none to write."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "rollout-engine" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"rollout-engine-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise CapabilityError(f"{folder} belongs to another user", "set XDG_CACHE_HOME to a directory of your own")
    return folder


def ensure_native() -> Path:
    """The path of the helper for these sources, built now where it has to be (about a second).

    A binary that is named by `$ROLLOUT_NATIVE`, or came with the package (`native/bin/<hash>`), is used as it is.

    Raises:
        ConfigError: the named one is no executable.
        CapabilityError: no binary and no working C compiler.
    """
    if (named := named_native()) is not None:
        if not os.access(named, os.X_OK):
            raise ConfigError(NAMED_BY, named, "must be the path of an executable helper; or unset it")
        return Path(named)
    shipped = NATIVE / "bin" / source_hash()
    if os.access(shipped, os.X_OK):
        return shipped
    built = cache_dir() / f"{NAME}-{source_hash()}"
    if not os.access(built, os.X_OK):
        compile_native(built)
    return built


def named_native() -> str | None:
    """The helper that the user named, if any."""
    return os.environ.get(NAMED_BY) or None


def find_compiler() -> str | None:
    """The system's C compiler: `$CC`, or the first of the usual names."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compile_native(target: Path) -> None:
    """Compiles the helper to `target` and puts it there by rename.

    Raises:
        CapabilityError: no compiler, or the compiler's own words.
    """
    compile_c(target, sorted(NATIVE.glob("*.c")), FLAGS, LINKINGS)


def compile_c(target: Path, sources: Sequence[Path], flags: Sequence[str], linkings: Sequence[Sequence[str]]) -> None:
    """Compiles C sources to `target`, with the first of `linkings` that works, and puts it there by rename.

    Raises:
        CapabilityError: no compiler, or the compiler's own words.
    """
    compiler = find_compiler()
    if not compiler:
        raise CapabilityError("no C compiler for the sandbox's native helper", "install one (Debian: apt install gcc)")
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=f".{NAME}-", dir=target.parent)
    os.close(handle)
    try:
        for linking in linkings:
            command = [*compiler.split(), *flags, *linking, "-o", scratch, *map(str, sources)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
            if done.returncode == 0:
                os.chmod(scratch, 0o755)
                os.rename(scratch, target)
                return
        raise CapabilityError(f"the native helper does not compile: {done.stderr.strip()}", f"check {compiler}")
    finally:
        Path(scratch).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_native()}\n")
