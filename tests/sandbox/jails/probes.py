"""Questions that code inside a sandbox answers about what it can see and do."""

from __future__ import annotations

import json
from typing import Any

from sandbox.sandbox import Sandbox
from sandbox.types import Command

PRELUDE = """
import ctypes, errno, fcntl, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    ctypes.set_errno(0)
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    result = libc.syscall(ctypes.c_long(number), *words)
    return result if result >= 0 else errno.errorcode[ctypes.get_errno()]
def attempt(action, *arguments):
    try:
        action(*arguments)
        return "ok"
    except OSError as error:
        return errno.errorcode[error.errno]
def answer(value):
    print(json.dumps(value))
"""


async def ask(box: Sandbox, code: str, *arguments: str) -> Any:
    """What `code` hands to `answer(…)`, run by the toolchain's Python.

    It has `call(number, …)`, a raw system call giving its result or the error's name, and `attempt(function, …)`,
    giving "ok" or the error's name.
    """
    outcome = await box.run(Command(argv=("python3", "-c", PRELUDE + code, *arguments), timeout_s=30))
    assert outcome.ok, outcome.stderr.decode()
    return json.loads(outcome.stdout)
