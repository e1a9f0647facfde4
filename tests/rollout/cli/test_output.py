"""Results reach stdout whole, however it is connected."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import signal
from rollout.cli.output import print_json
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
print_json({"stdout": "\\0" * 2_000_000})
signal.setitimer(signal.ITIMER_REAL, 0.0)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_object_is_whole_though_signals_cut_its_writes_short(unbuffered: str) -> None:
    """With PYTHONUNBUFFERED, `print` would lose the rest of an interrupted write without a word."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, timeout=60, env={"PYTHONUNBUFFERED": unbuffered}
    )
    assert done.returncode == 0, done.stderr.decode()
    assert len(json.loads(done.stdout)["stdout"]) == 2_000_000
