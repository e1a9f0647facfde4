"""`python -m learner.serve`. Owns the environment that must be set before torch is loaded."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Runs the policy server; returns the exit status."""
    # Threads that spin at OpenMP barriers stall each other as soon as anything else wants a core
    # (sandboxes do): measured 0.45 s against 0.3 to 15 s for the same work. libgomp reads this at load time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from learner.serve.process import main as serve

    return serve()


if __name__ == "__main__":
    sys.exit(main())
