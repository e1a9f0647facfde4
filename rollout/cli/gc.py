"""`rollout gc`: removes what dead engines left on this host.

Owns: nothing. Invariant: exit status 0 means that nothing is left; living engines are never touched.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the flags."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "gc",
        help="remove what dead engines left; living ones are not touched",
        description="Remove what `rollout census` counts, and kept layers over a size. Exit status: 0 when nothing is "
        "left, 1 otherwise.",
    )
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where images and engines' records live")
    parser.add_argument(
        "--max-layers",
        metavar="SIZE",
        default="10G",
        help="disk for kept layers; those that nobody uses go beyond it, the longest unused first (default: 10G)",
    )
    parser.add_argument("--json", action="store_true", help="print one object")


def run(arguments: argparse.Namespace) -> int:
    """Remove and report."""
    import msgspec

    from rollout.cli.census import existing_state_dir, print_census, say_if_absent
    from rollout.cli.output import print_json
    from sandbox.health.gc import collect
    from sandbox.quantities import parse_size

    max_bytes = parse_size("--max-layers", arguments.max_layers)
    collection = collect(existing_state_dir(arguments.state_dir), max_layer_bytes=max_bytes)
    if arguments.json:
        print_json({**msgspec.to_builtins(collection), "total_left": collection.left.total})
        return 0 if collection.left.total == 0 else 1
    say_if_absent(collection.left)
    for entry in collection.removed:
        print(f"removed {entry}")
    for entry in collection.failed:
        print(f"could not remove {entry}")
    if collection.left.total:
        print_census(collection.left)
    else:
        print(f"nothing is left ({len(collection.removed)} removed)")
    return 0 if collection.left.total == 0 else 1
