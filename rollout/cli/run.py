"""`rollout run`: groups of episodes into a run directory.

Owns the meaning of its flags and what it prints. Invariant: a group counted in the summary is in
the journal.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.cli.flags import EPILOG, add_policy_flags

if TYPE_CHECKING:
    from rollout.cli.assembly import Setup

_EXIT = """
exit status: 0 when every group was journaled, 1 when groups or samples were lost to faults, 2 when what was asked
for is wrong. `rollout show RUN_DIR` lists what was recorded.
"""


def add_parser(subparsers: Any) -> None:
    """Declare the flags."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "run",
        help="run groups of episodes and journal everything",
        description="Run groups of episodes of every task; each turn, test and verdict goes into a run directory.",
        epilog=EPILOG + _EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_policy_flags(parser)
    parser.add_argument("--group-size", type=int, default=8, metavar="N", help="episodes of each task (default: 8)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of sampling (default: 1.0)")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where to journal (default: runs/DATE-TIME)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Runs, reports, and returns the exit status."""
    from rollout.cli.assembly import read_setup
    from rollout.cli.output import print_json
    from rollout.cli.toolchain import ensure_toolchain
    from sandbox.loop import run_on_loop

    if arguments.run_dir is None:
        arguments.run_dir = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    run_dir: Path = arguments.run_dir
    setup = read_setup(arguments, group_size=arguments.group_size, temperature=arguments.temperature)
    ensure_toolchain(None)
    summary = run_on_loop(_run, setup, run_dir)
    if arguments.json:
        print_json(summary)
    else:
        print(
            f"{summary['groups']} groups of {arguments.group_size} ({summary['dropped']} dropped), "
            f"mean reward {summary['mean_reward']:.3f} over {summary['samples']} samples "
            f"({summary['invalid']} lost to faults), {summary['turns']} turns, {summary['action_tokens']} sampled "
            f"tokens, {summary['wall_s']:.1f} s\njournal: {run_dir} (rollout show {run_dir})"
        )
    return 1 if summary["dropped"] or summary["invalid"] else 0


async def _run(setup: Setup, run_dir: Path) -> dict[str, Any]:
    from rollout.cli.assembly import open_engine
    from rollout.cli.watch import Watch

    started_s = time.monotonic()
    async with open_engine(setup, run_dir=run_dir, command=shlex.join(["rollout", *sys.argv[1:]])) as engine:
        with Watch("run", len(setup.tasks)) as watch:
            async for group in engine.run(setup.tasks):
                watch.saw(group)
        metrics = engine.metrics.snapshot()
    return {
        "run_dir": str(run_dir),
        "groups": watch.num_groups,
        "dropped": watch.num_dropped,
        "samples": watch.num_samples,
        "invalid": watch.num_invalid,
        "mean_reward": watch.mean_reward,
        "turns": int(metrics["turns"]),
        "action_tokens": int(metrics["action_tokens"]),
        "wall_s": round(time.monotonic() - started_s, 3),
        "metrics": metrics,
    }
