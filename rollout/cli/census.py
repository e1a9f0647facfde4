"""`rollout census`: counts what dead engines left on this host.

Owns: nothing; only reads. Invariant: exit status 0 means that nothing was left.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox.health.census import Census

KINDS = ("dead_engines", "processes", "cgroups", "mounts", "directories", "shared_memory")


def add_parser(subparsers: Any) -> None:
    """Declare the flags."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "census",
        help="count what dead engines left: processes, cgroups, mounts, files, shared memory",
        description="Count what dead engines left. Exit status: 0 when there is nothing, 1 otherwise.",
    )
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where images and engines' records live")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    """Look and print."""
    import msgspec

    from rollout.cli.output import print_json
    from sandbox.health.census import take_census

    census = take_census(existing_state_dir(arguments.state_dir))
    if arguments.json:
        print_json({**msgspec.to_builtins(census), "total": census.total})
    else:
        say_if_absent(census)
        print_census(census)
    return 0 if census.total == 0 else 1


def existing_state_dir(named: Path | None) -> Path:
    """The state directory to look at. Only the default one may be missing: then no engine has run here.

    Raises:
        ConfigError: the one that was named does not exist.
    """
    from rollout.errors import ConfigError
    from sandbox.estate.state import STATE_DIR_VARIABLE, default_state_dir

    path = named or default_state_dir()
    source = "--state-dir" if named else STATE_DIR_VARIABLE
    try:
        path.stat()
    except FileNotFoundError:
        if named or os.environ.get(STATE_DIR_VARIABLE):
            raise ConfigError(source, str(path), "does not exist; name the directory that engines use") from None
    except OSError:
        return path  # what is wrong with it is said by the one who reads it
    return path


def say_if_absent(census: Census) -> None:
    """A line where there is no state directory, so that a count of nothing is no riddle."""
    if not os.path.lexists(census.state_dir):
        print(f"{census.state_dir} does not exist: no engine has run with it")


def print_census(census: Census) -> None:
    """A count per kind, with the entries below it."""
    for kind in KINDS:
        entries = getattr(census, kind)
        print(f"{kind.replace('_', ' '):14} {len(entries)}")
        for entry in entries:
            print(f"    {entry}")
    print(f"{'living engines':14} {len(census.engines)} (untouched)")
    print(f"left over: {census.total}" + ("" if census.total == 0 else "; `rollout gc` removes it"))
