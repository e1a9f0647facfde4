"""Which jail tools the tests can use on this host."""

from __future__ import annotations

import pytest

from sandbox.errors import CapabilityError
from sandbox.estate.stage import find_tool
from sandbox.types import JailName


def installed(name: JailName) -> JailName:
    """That jail, where its tool is there; else the test is skipped."""
    try:
        find_tool(name)
    except CapabilityError as error:
        pytest.skip(str(error))
    return name
