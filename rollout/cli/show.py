"""`rollout show`: what a run directory recorded, in the terminal.

Owns the listing. Invariant: reads only, so a run that is still going on can be shown.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.journal.records import GroupRecord, Record
    from rollout.types import Group, Trajectory

_INDENT = "      "


def add_parser(subparsers: Any) -> None:
    """Declare the flags."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "show",
        help="list what a run recorded",
        description="List the groups of a run directory; with --group, every turn and verdict of one of them.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="made by rollout run, eval --run-dir or train")
    parser.add_argument("--group", type=int, metavar="ID", help="show this group in full")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="list the last N groups (default: 50)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, the listed groups in full")


def run(arguments: argparse.Namespace) -> int:
    """Prints, and returns the exit status."""
    from rollout.cli.output import print_json
    from rollout.errors import ConfigError
    from rollout.journal.reader import segments

    if arguments.limit < 0:
        raise ConfigError("--limit", arguments.limit, "must be at least 0")
    if not segments(arguments.run_dir):
        raise ConfigError("RUN_DIR", str(arguments.run_dir), "holds no journal")
    if arguments.json:
        print_json(_as_json(arguments))
        return 0
    for line in _group_lines(arguments) if arguments.group is not None else _overview_lines(arguments):
        print(line)
    return 0


def _groups(arguments: argparse.Namespace) -> list[GroupRecord]:
    from rollout.errors import ConfigError
    from rollout.journal.reader import read_records
    from rollout.journal.records import GroupRecord

    records = (record for record in read_records(arguments.run_dir) if isinstance(record, GroupRecord))
    if arguments.group is not None:
        found = [record for record in records if record.group.group_id == arguments.group]
        if not found:
            raise ConfigError("--group", arguments.group, "the run has no such group")
        return found
    # They are recorded as they finish; the last ones are those that began last.
    return heapq.nlargest(arguments.limit, records, key=lambda record: record.group.group_id)[::-1]


def _others(arguments: argparse.Namespace) -> Iterator[Record]:
    from rollout.journal.reader import read_records
    from rollout.journal.records import GroupRecord

    return (record for record in read_records(arguments.run_dir) if not isinstance(record, GroupRecord))


def _as_json(arguments: argparse.Namespace) -> dict[str, Any]:
    import msgspec

    return {
        "run_dir": str(arguments.run_dir),
        "groups": [msgspec.to_builtins(record) for record in _groups(arguments)],
        "records": [msgspec.to_builtins(record) for record in _others(arguments)],
    }


def _overview_lines(arguments: argparse.Namespace) -> Iterator[str]:
    from rollout.engine.evaluate import format_report
    from rollout.journal.records import DroppedRecord, EvalRecord, PhaseRecord, RunHeader

    for record in _others(arguments):
        match record:
            case RunHeader():
                yield f"process: {record.command or '(unnamed)'}"
            case PhaseRecord():
                yield f"phase {record.name}: {record.event} at step {record.step}"
            case EvalRecord():
                yield format_report(record.report)
            case DroppedRecord():
                yield f"dropped group {record.dropped.group_id} of {record.dropped.task_id}: {record.dropped.reason}"
            case _:
                pass
    groups = _groups(arguments)
    yield f"the last {len(groups)} groups:"
    yield f"{'group':>6}  {'task':<40} rewards (turn by turn), stop reasons"
    for record in groups:
        yield _group_line(record.group)


def _group_line(group: Group) -> str:
    rewards = " ".join(_rewards(trajectory) for trajectory in group.trajectories)
    reasons = ", ".join(
        f"{len(list(same))} {reason}"
        for reason, same in itertools.groupby(sorted(t.stop_reason.value for t in group.trajectories))
    )
    return f"{group.group_id:>6}  {group.task_id:<40} {rewards}  {reasons}"


def _rewards(trajectory: Trajectory) -> str:
    """`0>1`: the first turn failed, the second earned 1."""
    if not trajectory.turn_rewards:
        return "-"
    return ">".join("invalid" if reward is None else f"{reward:g}" for reward in trajectory.turn_rewards)


def _group_lines(arguments: argparse.Namespace) -> Iterator[str]:
    (record, *_) = _groups(arguments)
    yield _group_line(record.group)
    for trajectory, advantage in zip(record.group.trajectories, record.group.advantages, strict=True):
        yield from _trajectory_lines(trajectory, advantage)


def _trajectory_lines(trajectory: Trajectory, advantage: float) -> Iterator[str]:
    yield (
        f"trajectory {trajectory.trajectory_id}: rewards {_rewards(trajectory)}, advantage {advantage:+.3f}, "
        f"{trajectory.stop_reason.value}, {sum(trajectory.loss_mask)} of {len(trajectory.token_ids)} tokens sampled, "
        f"{trajectory.wall_s:.2f} s"
    )
    for fault in trajectory.faults:
        yield f"  fault before: {fault}"
    for number, turn in enumerate(trajectory.turns, 1):
        yield f"  turn {number}: {turn.num_action_tokens} tokens, finish {turn.finish_reason}"
        yield from _block("action", turn.action)
        for command in turn.commands:
            yield from _block("command", f"{' '.join(command.argv)} -> {command.reason} {command.exit_code}")
        if turn.visible is not None:
            passed = f"{turn.visible.num_passed} of {turn.visible.num_tests} passed"
            yield from _block("visible tests", f"{passed}\n{turn.visible.evidence}")
        if turn.observation:
            yield from _block("observation", turn.observation)
    for layer in trajectory.verdict.layers:
        verdict = "passed" if layer.passed else "failed"
        yield f"  {layer.layer}: {verdict}, {layer.num_passed} of {layer.num_tests} tests, {layer.wall_s:.3f} s"
        if layer.evidence:
            yield from _block("evidence", layer.evidence)


def _block(title: str, text: str) -> Iterator[str]:
    yield f"    {title}:"
    for line in text.strip().splitlines():
        yield _INDENT + "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
