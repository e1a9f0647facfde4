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
    density = parser.add_argument_group("of bench density")
    density.add_argument("--sandboxes", type=_count, metavar="N", help="how many live at once (default 1000)")
    density.add_argument("--leased", type=_count, metavar="M", help="of those with limits of their own (default N/10)")
    density.add_argument("--report", metavar="DIR", help="folder for the picture (default: below runs/)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("must be a whole number, 0 or more")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Runs one benchmark; returns the process's exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        options = {name: getattr(arguments, name) for name in ("sandboxes", "leased", "report")}
        given = {name: value for name, value in options.items() if value is not None}
        _measure(arguments.name, arguments.json, quick=arguments.quick, options=given)
    except CannotMeasure as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_MEASURE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _measure(name: str, json_path: Path | None, *, quick: bool, options: dict[str, object]) -> None:
    import msgspec
    from rich.console import Console

    from bench.table import print_report

    if json_path is not None and not json_path.parent.is_dir():
        raise CannotMeasure(f"--json {json_path}: {json_path.parent} is not a directory")
    report = run_benchmark(name, quick=quick, options=options)
    print_report(report, Console(highlight=False, soft_wrap=True))
    if json_path is not None:
        try:
            json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        except OSError as error:
            raise CannotMeasure(f"--json {json_path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
