"""Finds the Python interpreter that the toolchain image is copied from.

Owns: nothing; runs the interpreter once to ask for its layout. Invariant: what is described really started.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec

from sandbox.errors import ConfigError

_ASK = """
import json, os, sys, sysconfig
library = sysconfig.get_config_var("INSTSONAME") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None
# Where it was really loaded from: a relocated installation still carries the paths that it was built with.
with open("/proc/self/maps") as file:
    loaded = {line.split(None, 5)[5].strip() for line in file if len(line.split(None, 5)) == 6}
path = next((path for path in sorted(loaded) if library and os.path.basename(path) == library), None)
print(json.dumps({
    "executable": os.path.realpath(sys.executable), "version": "%d.%d" % sys.version_info[:2],
    "full_version": sys.version, "stdlib": sysconfig.get_path("stdlib"),
    "soabi": sysconfig.get_config_var("SOABI") or "",
    "shared_library": path, "is_venv": sys.prefix != sys.base_prefix,
}))
"""


class Interpreter(msgspec.Struct, frozen=True):
    """One CPython installation, as it describes itself."""

    executable: Path
    version: str
    """`3.11`."""
    full_version: str
    stdlib: Path
    soabi: str
    """Binary interface of extension modules; equal ones can share compiled packages."""
    shared_library: Path | None
    """libpython, where the executable is linked against one."""
    is_venv: bool


def find_interpreter(source_prefix: Path | None = None) -> Interpreter:
    """Describe the interpreter under `source_prefix` (by default the one that runs us, outside its venv).

    Raises ConfigError (field `source_prefix`) when there is none or it does not start.
    """
    prefix = Path(sys.base_prefix) if source_prefix is None else source_prefix
    executable = _executable(prefix)
    try:
        answer = subprocess.run(
            [str(executable), "-I", "-c", _ASK], capture_output=True, check=True, timeout=30, stdin=subprocess.DEVNULL
        )
        found = msgspec.json.decode(answer.stdout, type=Interpreter, dec_hook=lambda kind, text: kind(text))
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError) as error:
        raise ConfigError(
            "source_prefix", str(prefix), f"{executable} does not start as CPython 3 ({error})"
        ) from error
    if found.is_venv:
        raise ConfigError("source_prefix", str(prefix), "is a virtual environment; name the installation under it")
    return found


def _executable(prefix: Path) -> Path:
    """The interpreter in `prefix/bin`: our own version when it is there, else the newest."""
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if (prefix / "bin" / own).is_file():
        return prefix / "bin" / own
    versions = [
        (int(match[1]), path)
        for path in (prefix / "bin").glob("python3.*")
        if (match := re.fullmatch(r"python3\.(\d+)", path.name))
    ]
    if not versions:
        raise ConfigError(
            "source_prefix", str(prefix), "has no bin/python3.N; name the prefix of a CPython installation"
        )
    return max(versions)[1]
