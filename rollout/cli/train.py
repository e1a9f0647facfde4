"""`rollout train`: the main job."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rollout.errors import ConfigError, Fault
from sandbox.loop import run_on_loop

if TYPE_CHECKING:
    from rollout.train.config import TrainConfig

RUNS = Path("runs")


def add_parser(subparsers: Any) -> None:
    """Declares the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a policy on executed, verified tasks",
        description="Supervised steps, an evaluation, RL steps, an evaluation. CONFIG is a TOML file or a bundled "
        "configuration (`demo`). A run that ended early goes on from its last checkpoint with --resume.",
    )
    parser.add_argument("config", nargs="?", help="TOML file, or the name of a bundled configuration")
    parser.add_argument("--run-dir", type=Path, help="where the run is kept (default: runs/NAME-TIME)")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with this run; its own config is used")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Trains; returns 0 when the run is complete."""
    from rollout.cli.output import print_json
    from rollout.cli.toolchain import ensure_toolchain
    from rollout.train.progress import make_progress
    from rollout.train.report import print_report
    from rollout.train.run import train

    config, run_dir = _prepare(arguments)
    ensure_toolchain(Path(config.sandbox.state_dir) if config.sandbox.state_dir else None)
    progress = make_progress(arguments.quiet)
    progress.say(f"run directory: {run_dir}")
    resume = arguments.resume is not None
    try:
        report = run_on_loop(partial(train, config, run_dir, resume=resume, progress=progress))
    except (Fault, KeyboardInterrupt):
        progress.close()
        print(f"the run can be continued: rollout train --resume {run_dir}", file=sys.stderr)
        raise
    finally:
        progress.close()
    if arguments.json:
        print_json(report)
    else:
        print_report(report, Console())
    return 0


def _prepare(arguments: argparse.Namespace) -> tuple[TrainConfig, Path]:
    """The config and the run directory; a new one is made, with its own copy of the config."""
    from rollout.train.config import load_config, save_config, saved_config

    if arguments.resume is not None:
        if arguments.config or arguments.run_dir:
            raise ConfigError(
                "--resume", str(arguments.resume), "takes no CONFIG and no --run-dir: the run has its own"
            )
        try:
            return saved_config(arguments.resume), arguments.resume
        except OSError as error:
            raise ConfigError("--resume", str(arguments.resume), f"holds no run ({error.strerror})") from None
    if not arguments.config:
        raise ConfigError("CONFIG", None, "name a TOML file or a bundled configuration, for example `demo`")
    config = load_config(arguments.config)
    run_dir = arguments.run_dir or RUNS / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if any(run_dir.iterdir()):
            raise ConfigError("--run-dir", str(run_dir), "is not empty; choose another, or go on with it by --resume")
        save_config(config, run_dir)
    except OSError as error:
        raise ConfigError("--run-dir", str(run_dir), f"cannot be a run directory ({error.strerror})") from error
    return config, run_dir
