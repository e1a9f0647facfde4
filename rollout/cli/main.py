"""The `rollout` command: parses, dispatches, and turns users' mistakes into one clear line.

Invariant: a user's own mistake never shows a traceback; a bug of ours always does.
Exit status 2 stands for a mistake in what was asked, 3 for a fault while it ran.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from rollout import errors as rollout_errors
from sandbox import errors as sandbox_errors

COMMANDS = ("doctor", "exec", "verify", "eval", "run", "train", "show", "image", "census", "gc")
"""Each is a module of `rollout.cli` with `add_parser(subparsers)` and `run(arguments) -> int`."""

USAGE_ERROR = 2
FAULT = 3
INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; importing a command's module imports nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="rollout",
        description="Reinforcement learning of language models on executable tasks, on one node.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"rollout.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    arguments = build_parser().parse_args(argv)
    command = importlib.import_module(f"rollout.cli.{arguments.command}")
    try:
        status: int = command.run(arguments)
    except (rollout_errors.ConfigError, sandbox_errors.ConfigError, sandbox_errors.CapabilityError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (rollout_errors.Fault, sandbox_errors.SandboxError) as error:
        print(f"fault: {type(error).__name__}: {error}", file=sys.stderr)
        return FAULT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`rollout … | head`): that is its right.
        sys.stderr.close()
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main())
