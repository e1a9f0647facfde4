"""The learner process: the entry point around `learner.loop`.

    python -m learner.train --config learner.json --lane-fd N --weights-fd N --parent-fd N --run-dir DIR [--resume]

Owns what must happen before torch is loaded, which takes seconds: from the first moment the process dies
with its parent, and idle arithmetic threads sleep instead of spinning, because engine, sandboxes and policy
server share these cores. Invariant: exit status 0 means that the engine said Finish and a checkpoint is saved.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from learner.watchdog import exit_with_parent
from rollout.config.learner import LearnerConfig
from rollout.errors import RolloutError
from rollout.lane.errors import PeerGone

EXIT_FAILED, EXIT_ENGINE_GONE = 1, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the process; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m learner.train", description="Train a policy from a lane.")
    parser.add_argument("--config", type=Path, required=True, help="LearnerConfig as JSON")
    parser.add_argument("--lane-fd", type=int, required=True, help="inherited socket to the engine")
    parser.add_argument("--weights-fd", type=int, help="inherited socket to the policy server")
    parser.add_argument("--parent-fd", type=int, help="read end of a pipe; its end of file ends the process")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    args = parser.parse_args(argv)
    if args.parent_fd is not None:
        exit_with_parent(args.parent_fd)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch loads its thread pool
    from learner.loop import run

    try:
        run(
            msgspec.json.decode(args.config.read_bytes(), type=LearnerConfig),
            lane=socket.socket(fileno=args.lane_fd),
            weights=None if args.weights_fd is None else socket.socket(fileno=args.weights_fd),
            run_dir=args.run_dir,
            resume=args.resume,
        )
    except PeerGone as error:
        print(f"learner: {error}", file=sys.stderr)
        return EXIT_ENGINE_GONE
    except RolloutError as error:
        print(f"learner: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
