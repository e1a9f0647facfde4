"""`rollout image` on a state directory of its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.cli.main import main


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that every uid may pass."""
    folder = Path(tempfile.mkdtemp(prefix="rollout-image-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_an_image_below_a_relative_state_directory_runs_from_anywhere(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(open_folder)
    assert main(["image", "build", "python", "--state-dir", "own/state", "--json"]) == 0
    built = json.loads(capfd.readouterr().out)
    assert built["path"].startswith(f"{open_folder}/own/state/images/")
    assert main(["image", "list", "--state-dir", "own/state"]) == 0
    assert "python   ready" in capfd.readouterr().out
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys, "stdin", None)
    words = ["--state-dir", os.path.relpath(open_folder / "own" / "state"), "--image", "python"]
    assert main(["exec", *words, "--", "python3", "-c", "import numpy; print('runs')"]) == 0
    assert capfd.readouterr().out == "runs\n"
