"""`rollout census`: counts what dead engines left on this host.

Owns: nothing; only reads. Invariant: exit status 0 means that nothing was left.
"""

from __future__ import annotations

import argparse
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
    from sandbox.estate.state import default_state_dir
    from sandbox.health.census import take_census

    census = take_census(arguments.state_dir or default_state_dir())
    if arguments.json:
        print_json({**msgspec.to_builtins(census), "total": census.total})
    else:
        print_census(census)
    return 0 if census.total == 0 else 1


def print_census(census: Census) -> None:
    """A count per kind, with the entries below it."""
    for kind in KINDS:
        entries = getattr(census, kind)
        print(f"{kind.replace('_', ' '):14} {len(entries)}")
        for entry in entries:
            print(f"    {entry}")
    print(f"{'living engines':14} {len(census.engines)} (untouched)")
    print(f"left over: {census.total}" + ("" if census.total == 0 else "; `rollout gc` removes it"))
