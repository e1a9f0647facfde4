"""`python -m learner.serve`: the policy server's command line.

Owns what must happen before torch is loaded, which takes seconds: from the first moment the process dies with
its parent, and arithmetic threads sleep at barriers instead of spinning.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from learner.watchdog import exit_with_parent


def main(argv: list[str] | None = None) -> int:
    """Runs the policy server; returns the exit status."""
    arguments = parse_arguments(argv)
    if arguments.parent_fd is not None:
        exit_with_parent(arguments.parent_fd)
    # Spinning threads stall each other as soon as anything else wants a core, and sandboxes do: the same work
    # took 0.45 s instead of 0.3 to 15 s. libgomp reads this once, when torch loads it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from learner.serve.process import run

    return run(arguments)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m learner.serve", description="Sample from a policy, token ids in and out, over HTTP."
    )
    address = parser.add_mutually_exclusive_group(required=True)
    address.add_argument("--socket", type=Path, help="serve on this Unix socket (mode 600)")
    address.add_argument("--port", type=int, help="serve on this TCP port; 0 picks a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address for --port (default: loopback)")
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="Hugging Face folder (Llama or Qwen2)")
    model.add_argument("--builtin", type=Path, help="JSON with the sizes and the seed of a built-in decoder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and cache")
    parser.add_argument(
        "--max-batch", type=int, help="sequences decoded together (default 256, less if memory is small)"
    )
    parser.add_argument("--max-len", type=int, help="tokens per sequence (default: the model's limit, at most 2048)")
    parser.add_argument("--max-waiting", type=int, default=4096, help="requests that may wait for a row (then 429)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the arithmetic")
    parser.add_argument("--seed", type=int, default=0, help="for requests that bring no seed of their own")
    parser.add_argument("--weights-fd", type=int, help="inherited SEQPACKET socket on which weights are published")
    parser.add_argument("--parent-fd", type=int, help="inherited descriptor; its EOF ends this process")
    arguments = parser.parse_args(argv)
    for name, least in (("threads", 1), ("max_waiting", 0), ("max_batch", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
