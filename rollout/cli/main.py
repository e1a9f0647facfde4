"""The `rollout` command: parses, dispatches, and turns users' mistakes into one clear line.

Invariant: a user's own mistake never shows a traceback; a bug of ours always does.
Exit status 2 stands for a mistake in what was asked, 3 for a fault while it ran (results that cannot be written, too).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
from pathlib import Path
from typing import Any

from rollout import errors as rollout_errors
from rollout.cli.flags import named_by_flags
from rollout.cli.output import ReaderGoneError, flush_stdout, give_up_stdout, open_standard_streams
from sandbox import errors as sandbox_errors

COMMANDS = ("doctor", "exec", "verify", "eval", "run", "train", "show", "image", "census", "gc")
"""Each is a module of `rollout.cli` with `add_parser(subparsers)` and `run(arguments) -> int`."""

USAGE_ERROR = 2
FAULT = 3
INTERRUPTED = 130

_NOT_OURS = "command_line"
"""Where `exec` keeps the words of the sandboxed command, which may be any bytes."""


_FLAGS = {name: "--" + name.replace("_", "-") for name in ("state_dir", "image", "model_dir", "sampler")}
_FLAGS["spec.workspace"] = "--workspace"
"""Settings that a deeper layer names by itself, where a command has a flag for them."""


class Parser(argparse.ArgumentParser):
    """Refuses, whatever the argument, what no command can use: text that is not UTF-8, and an empty path."""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if action.dest != _NOT_OURS and action.nargs != argparse.PARSER:  # else a command's own words, checked later
            try:
                arg_string.encode()
            except UnicodeEncodeError:
                raise rollout_errors.ConfigError(_name(action), arg_string, "must be valid UTF-8") from None
            if action.type is Path and not arg_string:
                raise rollout_errors.ConfigError(_name(action), arg_string, "must name a path")
        return super()._get_value(action, arg_string)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; importing a command's module imports nothing heavy."""
    parser = Parser(
        prog="rollout",
        description="Reinforcement learning of language models on executable tasks, on one node.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"rollout.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit status."""
    open_standard_streams()
    try:
        status = _dispatch(argv)
        flush_stdout()
    except (rollout_errors.ConfigError, sandbox_errors.ConfigError, sandbox_errors.CapabilityError) as error:
        status = _say(f"error: {error}", USAGE_ERROR)
    except (rollout_errors.Fault, sandbox_errors.SandboxError) as error:
        status = _say(f"fault: {type(error).__name__}: {error}", FAULT)
    except KeyboardInterrupt:
        status = _say("interrupted", INTERRUPTED)
    except (ReaderGoneError, BrokenPipeError):
        status = 0
    except OSError as error:
        if error.filename is None:
            raise
        kind, code = ("error", USAGE_ERROR) if error.errno == errno.ENAMETOOLONG else ("fault", FAULT)
        status = _say(f"{kind}: {error.filename}: {error.strerror}", code)  # the host refused a path
    else:
        return status
    _end_stdout()
    return status


def _dispatch(argv: list[str] | None) -> int:
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit:
        flush_stdout()  # --help
        raise
    command = importlib.import_module(f"rollout.cli.{arguments.command}")
    with named_by_flags({name: flag for name, flag in _FLAGS.items() if hasattr(arguments, name.rpartition(".")[2])}):
        status: int = command.run(arguments)
    return status


def _say(line: str, status: int) -> int:
    print(line, file=sys.stderr)
    return status


def _end_stdout() -> None:
    """After a failure: what was printed before it still goes out where it can."""
    try:
        flush_stdout()
    except (rollout_errors.Fault, ReaderGoneError):
        give_up_stdout()


def _name(action: argparse.Action) -> str:
    """What the user knows an argument by."""
    if action.option_strings:
        return action.option_strings[-1]
    return action.metavar if isinstance(action.metavar, str) else action.dest.upper()


if __name__ == "__main__":
    sys.exit(main())
