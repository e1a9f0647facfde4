"""Commands of the integration tests share one state directory, and so one toolchain image."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def shared_state(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ROLLOUT_STATE_DIR` for commands in this process and in those it starts."""
    monkeypatch.setenv("ROLLOUT_STATE_DIR", str(state_dir))
