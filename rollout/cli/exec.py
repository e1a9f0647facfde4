"""`rollout exec`: one command in a fresh sandbox.

Owns: the meaning of its flags and of its exit status. Invariant: the status says what really happened (the command's
own code, or one of the codes below), and without `--json` stdout carries the command's bytes and nothing else.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout.cli.output import print_json
from rollout.files import read_file
from sandbox.cgroup.types import LIMIT_NAMES
from sandbox.errors import ConfigError
from sandbox.quantities import format_size, parse_count, parse_duration, parse_number, parse_size
from sandbox.types import (
    GIB,
    IMAGE_ISOLATION,
    KIB,
    MAX_USER,
    MIB,
    Command,
    Limits,
    Outcome,
    Reason,
    SandboxSpec,
    Skipped,
    check_jail,
)

STATUS = {Reason.TIMEOUT: 124, Reason.OOM: 137, Reason.OUTPUT_LIMIT: 141, Reason.KILLED: 143}
"""Exit status for reasons that override the command's own code."""
_EPILOG = """exit status:
  the command's own when it ended by itself (also when it failed for want of disk or processes);
  128+N when signal N ended it; 124 after a timeout; 137 out of memory; 141 over the output limit;
  2 when what was asked for is wrong, 3 when the sandbox itself failed.
  With --json it is 0 whenever there is an outcome: read the object instead.

sizes: 64M, 1.5G, 512KiB (1024s; KB, MB, GB are 1000s).  durations: 5, 500ms, 10m.
"""
_PROMISES = (*LIMIT_NAMES, IMAGE_ISOLATION)
_MAX_WORKSPACE_FILE_BYTES = 256 * MIB
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4000
"""Below the kernel's 4096, with room for the workspace's own path."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def add_parser(subparsers: Any) -> None:
    """Declare the flags; values are parsed in `run`, so that a mistake is one clear line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "exec",
        help="run one command in a fresh sandbox",
        description="Run one command in a fresh sandbox: no network, read-only image, private workspace, quotas.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Limits()
    parser.add_argument("--image", default="host", metavar="NAME", help="host, python or a directory (default: host)")
    for flag, default, meaning in (
        (
            "--memory",
            format_size(defaults.memory_bytes),
            "memory of all processes; files written count towards it and --disk comes on top",
        ),
        ("--cpus", f"{defaults.cpus:g}", "CPU time per wall second, in cores"),
        ("--pids", f"{defaults.pids}", "processes and threads at once"),
        ("--disk", format_size(defaults.disk_bytes), "everything written to /workspace, /tmp and /dev/shm"),
        ("--file-size", format_size(defaults.file_size_bytes), "largest single file"),
        ("--open-files", f"{defaults.open_files}", "descriptors of one process"),
        ("--timeout", "30", "wall time; then everything it started is killed"),
        (
            "--output-limit",
            "1 MiB",
            "kept of stdout and of stderr: the head, shown as it comes, and the tail; 64 times as much ends it",
        ),
    ):
        parser.add_argument(flag, metavar="N", help=f"{meaning} (default: {default})")
    parser.add_argument("--cpu-time", metavar="N", help="CPU seconds of the command (default: no limit)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set a variable; repeatable")
    parser.add_argument(
        "--workspace-file",
        action="append",
        default=[],
        metavar="PATH[:NAME]",
        help="copy a file to /workspace/NAME (default: its own name); repeatable",
    )
    parser.add_argument(
        "--workspace", type=Path, metavar="DIR", help="copy a directory's files to /workspace (see --disk)"
    )
    parser.add_argument("--user", metavar="N", help="uid that the command sees as its own; 0 looks like root (1000)")
    parser.add_argument(
        "--insist",
        action="append",
        default=[],
        metavar="LIMIT",
        help="refuse to start unless enforced (memory, cpus, pids, disk, image_isolation); repeatable, comma-separated",
    )
    parser.add_argument("--network", default="none", metavar="MODE", help="none, the only mode: loopback alone")
    parser.add_argument("--jail", default="bubblewrap", metavar="NAME", help="bubblewrap (default) or nsjail")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where images and engines' records live")
    parser.add_argument("--json", action="store_true", help="print one object instead of the command's output")
    parser.add_argument(
        "command_line", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the command and its words"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit status that `_EPILOG` describes."""
    from rollout.cli.live import run_once

    spec = spec_from(arguments)
    command = command_from(arguments)
    files = workspace_files(arguments.workspace_file)
    has_stdin = not arguments.json and sys.stdin is not None and not sys.stdin.isatty()
    outcome, skipped = run_once(arguments.state_dir, spec, command, files, has_stdin=has_stdin, live=not arguments.json)
    if arguments.json:
        print_json(outcome_object(outcome, spec, skipped))
        return 0
    for line in remarks(outcome, spec, command, skipped):
        print(f"rollout exec: {line}", file=sys.stderr)
    return exit_status(outcome)


def spec_from(arguments: argparse.Namespace) -> SandboxSpec:
    """The sandbox that the flags describe; ConfigError names the flag."""
    if arguments.network != "none":
        raise ConfigError("--network", arguments.network, "must be none")
    jail = check_jail("--jail", arguments.jail)
    parsers: dict[str, tuple[str, Callable[[str, str], float]]] = {
        "memory_bytes": ("memory", lambda flag, text: parse_size(flag, text, 8 * MIB)),
        "cpus": ("cpus", lambda flag, text: parse_number(flag, text, 0.01, 1024)),
        "pids": ("pids", lambda flag, text: parse_count(flag, text, 2, 1 << 20)),
        "disk_bytes": ("disk", lambda flag, text: parse_size(flag, text, 64 * KIB)),
        "file_size_bytes": ("file_size", lambda flag, text: parse_size(flag, text)),
        "open_files": ("open_files", lambda flag, text: parse_count(flag, text, 16, 1 << 20)),
    }
    given: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for field, (name, parse) in parsers.items():
        text = getattr(arguments, name)
        if text is not None:
            given[field] = parse("--" + name.replace("_", "-"), text)
    if arguments.user is not None:
        rest["user"] = parse_count("--user", arguments.user, 0, MAX_USER)
    if arguments.workspace is not None:
        rest["workspace"] = os.path.abspath(arguments.workspace)
    insist = _insist_from(arguments.insist)
    return SandboxSpec(image=arguments.image, limits=Limits(**given), jail=jail, insist=insist, **rest)


def _insist_from(texts: list[str]) -> tuple[str, ...]:
    names = [(text, name) for text in texts for name in text.split(",")]
    for text, name in names:
        if name not in _PROMISES:
            raise ConfigError(
                "--insist", name or text, f"must be one of {', '.join(_PROMISES)}, or several with commas"
            )
    return tuple(name for _, name in names)


def command_from(arguments: argparse.Namespace) -> Command:
    """The command that the flags and the words after `--` describe; ConfigError names the flag."""
    words = arguments.command_line[1:] if arguments.command_line[:1] == ["--"] else arguments.command_line
    if not words:
        raise ConfigError("CMD", "", "name a command after `--`, such as `rollout exec -- echo hello`")
    env = {}
    for text in arguments.env:
        name, equals, value = text.partition("=")
        if not equals or not _ENV_NAME.fullmatch(name):
            raise ConfigError("--env", text, "must be NAME=VALUE, the name of letters, digits and _")
        env[name] = value
    given: dict[str, Any] = {}
    if arguments.timeout is not None:
        given["timeout_s"] = parse_duration("--timeout", arguments.timeout)
    if arguments.cpu_time is not None:
        given["cpu_s"] = parse_duration("--cpu-time", arguments.cpu_time)
    if arguments.output_limit is not None:
        given["output_limit_bytes"] = parse_size("--output-limit", arguments.output_limit, 0, GIB)
    return Command(argv=tuple(words), env=env, **given)


def workspace_files(texts: list[str]) -> list[tuple[str, bytes]]:
    """Path inside the sandbox and content of each `--workspace-file`; ConfigError for one that cannot be read."""
    files: list[tuple[str, bytes]] = []
    for text in texts:
        path, colon, name = text.rpartition(":")
        source, name = (Path(path), name) if colon else (Path(text), Path(text).name)
        parts = Path(name).parts
        if not parts or name.startswith("/") or ".." in parts:
            raise ConfigError("--workspace-file", text, "the name must be relative and stay inside the workspace")
        if max(map(_num_bytes, parts)) > _MAX_NAME_BYTES or _num_bytes(name) > _MAX_PATH_BYTES:
            raise ConfigError("--workspace-file", text, "the name is longer than a file system allows")
        target = f"/workspace/{'/'.join(parts)}"
        if any(f"{target}/".startswith(f"{path}/") or f"{path}/".startswith(f"{target}/") for path, _ in files):
            raise ConfigError("--workspace-file", text, "another one has this name already, or one above or below it")
        data = read_file(source, "--workspace-file", max_bytes=_MAX_WORKSPACE_FILE_BYTES)
        files.append((target, data))
    return files


def _num_bytes(name: str) -> int:
    return len(name.encode())


def exit_status(outcome: Outcome) -> int:
    """The status for a shell; see `_EPILOG`."""
    if outcome.reason in STATUS:
        return STATUS[outcome.reason]
    if outcome.signal is not None:
        return 128 + outcome.signal
    assert outcome.exit_code is not None, "an ended command has a code or a signal"
    return outcome.exit_code


def remarks(outcome: Outcome, spec: SandboxSpec, command: Command, skipped: Sequence[Skipped] = ()) -> list[str]:
    """Lines for stderr: why it ended (unless it just exited), what was cut, which limits do not hold here."""
    limits = spec.limits
    lines = []
    why = {
        Reason.SIGNAL: f"ended by signal {outcome.signal} ({_signal_name(outcome.signal)})",
        Reason.TIMEOUT: f"timeout after {outcome.usage.wall_s:.2f} s wall, {outcome.usage.cpu_s:.2f} s CPU",
        Reason.OOM: f"out of memory at {format_size(limits.memory_bytes)} and the disk quota's "
        f"{format_size(limits.disk_bytes)} ({outcome.usage.oom_kills} killed)",
        Reason.OUTPUT_LIMIT: f"ended for writing over {format_size(_kill_output_bytes(command))} to one stream",
        Reason.DISK: f"failed with the disk full ({format_size(limits.disk_bytes)}, {limits.inodes} files)",
        Reason.PIDS: f"failed at the limit of {limits.pids} processes",
        Reason.KILLED: "cancelled",
    }
    if outcome.reason is not Reason.EXIT:
        lines.append(why[outcome.reason])
    for name, cut in (("stdout", outcome.stdout_truncated_bytes), ("stderr", outcome.stderr_truncated_bytes)):
        if cut:
            lines.append(f"{name} shortened: {format_size(cut)} left out of its middle")
    if skipped:
        lines.append(f"left out of the workspace: {', '.join(sorted({one.kind for one in skipped}))} ({len(skipped)})")
    if outcome.unenforced:
        lines.append(f"not enforced on this host: {', '.join(outcome.unenforced)} (see `rollout doctor`)")
    return lines


def outcome_object(outcome: Outcome, spec: SandboxSpec, skipped: Sequence[Skipped] = ()) -> dict[str, Any]:
    """What `--json` prints: plain JSON data; streams as text, and as base64 too where they are not UTF-8."""
    result: dict[str, Any] = {
        "reason": str(outcome.reason),
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "wall_s": round(outcome.usage.wall_s, 6),
        "cpu_s": round(outcome.usage.cpu_s, 6),
        "peak_memory_bytes": outcome.usage.peak_memory_bytes,
        "peak_scope": outcome.usage.peak_scope,
        "oom_kills": outcome.usage.oom_kills,
    }
    for name, data in (("stdout", outcome.stdout), ("stderr", outcome.stderr)):
        try:
            result[name] = data.decode()
        except UnicodeDecodeError:
            result[name] = data.decode("utf-8", "replace")
            result[f"{name}_base64"] = base64.b64encode(data).decode()
    result["truncated_bytes"] = outcome.stdout_truncated_bytes + outcome.stderr_truncated_bytes
    result["stdout_truncated_bytes"] = outcome.stdout_truncated_bytes
    result["stderr_truncated_bytes"] = outcome.stderr_truncated_bytes
    result["enforced"] = [name for name in _PROMISES if name not in outcome.unenforced]
    result["unenforced"] = list(outcome.unenforced)
    result["image"] = spec.image
    result["jail"] = spec.jail
    result["user"] = spec.user
    if spec.workspace is not None:
        result["workspace_skipped"] = [{"path": one.path, "kind": one.kind} for one in skipped]
    result["limits"] = {field: getattr(spec.limits, field) for field in spec.limits.__struct_fields__}
    return result


def _kill_output_bytes(command: Command) -> int:
    return command.kill_output_bytes or 64 * command.output_limit_bytes


def _signal_name(number: int | None) -> str:
    try:
        return signal.Signals(number or 0).name
    except ValueError:
        return "real-time"
