"""Shared fixtures: the event-loop backend of the project, and where the real data sets lie."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.images.python import build_python_image

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Async tests run as the engine does: asyncio on uvloop."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real task sets written by others; its tests skip where it is absent."""
    folder = Path(os.environ.get("ROLLOUT_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data sets at {folder} (set ROLLOUT_TEST_DATA)")
    return folder


@pytest.fixture(scope="session")
def state_dir() -> Iterator[Path]:
    """A state directory with the toolchain image. (pytest's own temporary directories are closed to other users.)"""
    path = Path(tempfile.mkdtemp(prefix="rollout-state-"))
    path.chmod(0o755)
    if ready := os.environ.get("ROLLOUT_TEST_IMAGES"):  # made beforehand, for a machine that would take minutes
        (path / "images").mkdir()
        for image in Path(ready).glob("python-*"):
            (path / "images" / image.name).symlink_to(image)
    build_python_image(path)
    yield path
    shutil.rmtree(path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--native",
        choices=("plain", "sanitized"),
        default="plain",
        help="the C helper that sandboxes use: as it is shipped, or built with AddressSanitizer and UBSan",
    )


def pytest_configure() -> None:
    """Processes that tests start can be interrupted, even where the tests run in a shell's background.

    Such a shell starts us with SIGINT ignored, which children would inherit; a handler they do not.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
