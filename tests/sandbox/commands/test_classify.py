"""Why a command ended: only what was observed, only where its limit is enforced."""

from __future__ import annotations

import signal

import msgspec
import pytest

from sandbox.commands.outcome import Observed, classify
from sandbox.types import Reason

CALM = Observed(
    status=0,
    killed_for=None,
    oom_kills=0,
    pids_refused=0,
    disk_full=False,
    cpu_s=0.0,
    cpu_limit_s=None,
    unenforced=(),
)
FAILED = 1 << 8


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, Reason.EXIT),
        ({"status": FAILED}, Reason.EXIT),
        ({"status": signal.SIGKILL}, Reason.SIGNAL),
        ({"status": signal.SIGKILL, "killed_for": Reason.TIMEOUT}, Reason.TIMEOUT),
        ({"status": signal.SIGKILL, "killed_for": Reason.OUTPUT_LIMIT, "oom_kills": 1}, Reason.OUTPUT_LIMIT),
        ({"status": 0, "killed_for": Reason.TIMEOUT}, Reason.EXIT),
        ({"status": signal.SIGKILL, "oom_kills": 1}, Reason.OOM),
        ({"status": FAILED, "oom_kills": 1}, Reason.OOM),
        ({"status": 0, "oom_kills": 1}, Reason.EXIT),
        ({"status": FAILED, "oom_kills": 1, "unenforced": ("memory",)}, Reason.EXIT),
        ({"status": FAILED, "pids_refused": 3}, Reason.PIDS),
        ({"status": FAILED, "pids_refused": 3, "unenforced": ("pids",)}, Reason.EXIT),
        ({"status": FAILED, "disk_full": True}, Reason.DISK),
        ({"status": 0, "disk_full": True}, Reason.EXIT),
        ({"status": signal.SIGXFSZ, "disk_full": True}, Reason.DISK),
        ({"status": signal.SIGSEGV, "disk_full": True}, Reason.SIGNAL),
        ({"status": signal.SIGXCPU, "cpu_limit_s": 1.0, "cpu_s": 1.0}, Reason.TIMEOUT),
        ({"status": signal.SIGXCPU, "cpu_limit_s": 1.0, "cpu_s": 0.6}, Reason.TIMEOUT),
        ({"status": signal.SIGXCPU, "cpu_limit_s": 100.0, "cpu_s": 0.1}, Reason.SIGNAL),
        ({"status": signal.SIGKILL, "cpu_limit_s": 1.0, "cpu_s": 0.2}, Reason.SIGNAL),
    ],
)
def test_the_reason_is_what_was_seen(changes: dict[str, object], reason: Reason) -> None:
    assert classify(msgspec.structs.replace(CALM, **changes)) is reason
