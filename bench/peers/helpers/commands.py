"""Runs a command line to its end, over and over: for tools that are programs.

Run with the command line as arguments, in which `{worker}` stands for the worker's number. Invariant: stdin is
/dev/null and both outputs are collected; it is started by `vfork`, from a small process, so that nothing is copied.
"""

from __future__ import annotations

import subprocess
import sys

from bench.peers.helpers.serving import serve_blocking


def main() -> None:
    """Serves the command line."""
    words = sys.argv[1:]

    def operate(worker: int) -> None:
        argv = [word.replace("{worker}", str(worker)) for word in words]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{argv[0]} ended with status {done.returncode}: {done.stderr.decode(errors='replace')}")

    serve_blocking(operate)


if __name__ == "__main__":
    main()
