"""`rollout eval`: pass rates of a policy on a task set.

Owns the meaning of its flags and what it prints. Invariant: the rates come from executed
programs; samples lost to faults are named and are no part of a rate.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.flags import EPILOG, add_policy_flags

if TYPE_CHECKING:
    from rollout.cli.assembly import Setup
    from rollout.engine.evaluate import EvalReport

_EXIT = """
exit status: 0 whatever was passed, 1 when samples were lost to faults, 2 when what was asked for is wrong.
"""


def add_parser(subparsers: Any) -> None:
    """Declare the flags."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        help="pass rates of a policy on a task set",
        description="Sample programs from a policy, execute them in sandboxes, and report pass rates.",
        epilog=EPILOG + _EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_policy_flags(parser)
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="episodes of each task (default: 1)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="of sampling (default: 0.8)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="journal every trajectory here")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Evaluates, reports, and returns the exit status."""
    from rollout.cli.assembly import read_setup
    from rollout.cli.output import print_json
    from rollout.cli.toolchain import ensure_toolchain
    from rollout.engine.evaluate import format_report
    from rollout.errors import ConfigError
    from sandbox.loop import run_on_loop

    if arguments.samples < 1:
        raise ConfigError("--samples", arguments.samples, "must be at least 1")
    setup = read_setup(arguments, group_size=arguments.samples, temperature=arguments.temperature)
    ensure_toolchain(None)
    report = run_on_loop(_evaluate, arguments, setup)
    if arguments.json:
        print_json(report)
    else:
        print(format_report(report))
    return 1 if report.num_invalid else 0


async def _evaluate(arguments: argparse.Namespace, setup: Setup) -> EvalReport:
    from rollout.cli.assembly import open_engine
    from rollout.cli.watch import Watch

    async with open_engine(setup, run_dir=arguments.run_dir, command=shlex.join(["rollout", *sys.argv[1:]])) as engine:
        with Watch("evaluate", len(setup.tasks)) as watch:
            return await engine.evaluate(
                setup.tasks, arguments.samples, arguments.temperature, name=arguments.tasks, progress=watch.saw
            )
