"""What a session is asked for and what it tells. Immutable plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict, get_args

import msgspec

from sandbox.checking import check_count, check_fields
from sandbox.errors import ConfigError

ShellName = Literal["bash", "sh"]
SHELL_NAMES: tuple[ShellName, ...] = get_args(ShellName)


class Size(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a terminal."""

    rows: int = 24
    cols: int = 80

    def __post_init__(self) -> None:
        check_fields(self, "size")
        check_count("size.rows", self.rows, 1, 65_535)
        check_count("size.cols", self.cols, 1, 65_535)


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """What another session can start from; what else a shell has (functions, jobs, options) is its own."""

    cwd: str
    """The shell's directory; `/workspace` where that has been deleted."""
    env: dict[str, str]
    """Its exported variables, all of them."""


class SessionOptions(TypedDict, total=False):
    """What `Sandbox.session` may be given; `sandbox.sessions.open.open_session` says what each means."""

    shell: ShellName | None
    cwd: str
    env: Mapping[str, str] | None
    pty: Size | None


def check_shell(name: str | None) -> ShellName | None:
    """The shell of that name; ConfigError where there is none."""
    for known in SHELL_NAMES:
        if name == known:
            return known
    if name is not None:
        raise ConfigError("session.shell", name, f"must be one of {', '.join(SHELL_NAMES)}, or None")
    return None
