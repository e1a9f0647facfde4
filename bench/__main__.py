"""The command `python -m bench NAME`: measures, prints a table, writes JSON.

Invariant: exit status 0 whatever the figures are, 2 with one line of why where nothing could be measured, 130 when
interrupted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.records import CannotMeasure
from bench.runner import BENCHMARKS, run_benchmark

CANNOT_MEASURE = 2
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    names = "\n".join(f"  {name:8} {what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measures a part of this project and its peers side by side, in one run.",
        epilog=f"benchmarks:\n{names}\n\nexit status: 0 whatever the figures, 2 when nothing could be measured",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="which benchmark (see below)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report there")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, under a minute in all")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one benchmark; returns the process's exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        _measure(arguments.name, arguments.json, quick=arguments.quick)
    except CannotMeasure as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_MEASURE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _measure(name: str, json_path: Path | None, *, quick: bool) -> None:
    import msgspec
    from rich.console import Console

    from bench.table import print_report

    if json_path is not None and not json_path.parent.is_dir():
        raise CannotMeasure(f"--json {json_path}: {json_path.parent} is not a directory")
    report = run_benchmark(name, quick=quick)
    print_report(report, Console(highlight=False, soft_wrap=True))
    if json_path is not None:
        try:
            json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        except OSError as error:
            raise CannotMeasure(f"--json {json_path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
