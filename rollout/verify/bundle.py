"""Makes the stand-alone programs that run inside sandboxes out of `rollout.verify.guest`.

Invariant: a program is one text that imports nothing of this project; it goes on the command line, so
a sandbox needs no file of ours.
"""

from __future__ import annotations

import base64
import marshal
import sys
from functools import cache
from importlib import resources

_GUEST = "rollout.verify.guest"
_PARTS = {"candidate": ("codec",), "judge": ("codec", "messages")}
MAX_ARGUMENT_BYTES = 128 * 1024
"""The kernel's bound of one argument (MAX_ARG_STRLEN)."""


@cache
def program(name: str) -> str:
    """Source of the guest program `candidate` or `judge`, the modules that it imports included."""
    text = "from __future__ import annotations\n" + "\n".join(map(_own_lines, (*_PARTS[name], name))) + "\n"
    assert len(text.encode()) < MAX_ARGUMENT_BYTES
    return text


_LAUNCHER = """\
import binascii, marshal, sys
_, version, code, source = sys.argv
del sys.argv[1:]
exec(marshal.loads(binascii.a2b_base64(code)) if version == sys.version else source)
"""
"""Compiling takes a few milliseconds; code objects of exactly this interpreter's version need none."""


@cache
def command(name: str) -> tuple[str, ...]:
    """The command line that runs it: no site, no user packages, no script's directory, no byte code written.

    Not `-I`, which would also ignore PYTHONHASHSEED, and with it make verdicts on set order a matter of luck.
    """
    source = program(name)
    code = base64.b64encode(marshal.dumps(compile(source, f"<{name}>", "exec"))).decode()
    return ("python3", "-S", "-s", "-P", "-B", "-c", _LAUNCHER, sys.version, code, source)


def _own_lines(name: str) -> str:
    lines = _source(name).splitlines()
    return "\n".join(line for line in lines if not line.startswith((f"from {_GUEST}", "from __future__")))


def _source(name: str) -> str:
    return resources.files(_GUEST).joinpath(f"{name}.py").read_text(encoding="utf-8")
