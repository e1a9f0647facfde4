"""Keeps torch to one thread: on few cores, spinning thread pools cost more than they give."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """For arithmetic inside the test process; child processes are told on their command lines."""
    torch.set_num_threads(1)
