"""What is said to a session's shell, and what it answers. Pure.

The shell is interactive (an error or an interrupt ends a run and not the shell) and reads its lines from a socket of
packets, its descriptor 0: every line below is one packet, so that a shell which throws away what it has read throws
away no line that it has not begun. A run is two lines. The first sources the script with the run's own streams in the
place of 0, 1 and 2, and the shell sets its socket aside, closed on exec, until that is over; the second answers over
the socket. No word of these lines can be an alias (`\\`), and of what a function can replace they use nothing but
what a subshell has cleared first: in bash's POSIX mode, which an assignment turns on, `unset` is the shell's own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from sandbox.sessions.types import ShellName

FIRST_HELD = 40
"""Number of the script in the holder, as in native/session.c; stdin, stdout and stderr follow."""
_START: dict[ShellName, tuple[str, ...]] = {
    "bash": ("bash", "--norc", "--noprofile", "--noediting", "-i"),
    "sh": (
        "sh",
        "-c",
        'case ${BASH_VERSION-} in "") exec sh -i;; *) exec sh --norc --noprofile --noediting -i;; esac',
    ),
}
_REPORT = re.compile(rb"(\d{1,9}) (\d{1,3})( \.)?\n")
_MARK = "rollout"

HELLO = r"""( POSIXLY_CORRECT=1; \unset -f printf; \printf '0 %d\n' $((${#BASH_VERSION} > 0)) ) >&0"""
"""Asks for report 0, whose status is 1 in bash."""
BASH_SETUP = "set +o history +H; unset HISTFILE; shopt -s execfail"
"""Nothing is remembered in files, and an `exec` of what does not exist ends nothing, as on a terminal."""
TERMINAL_SETUP = "exec 2>/dev/null"
"""The shell has its terminal by now; what it says by itself (prompts) is for nobody."""
NO_PROMPTS = "PS1= PS2="
"""For a shell that writes them to 1, as busybox's."""
READ_ENV = rf"( POSIXLY_CORRECT={_MARK}; \unset -f command; \command -p cat /proc/self/environ )"
"""A script that prints what the shell exports."""


class Report(NamedTuple):
    """The shell's word that a run is over."""

    number: int
    """Of the run."""
    status: int
    shadowed: bool
    """Is there a function in the place of `.`?"""


def start_words(shell: ShellName) -> tuple[str, ...]:
    """The command that becomes the shell. (Every shell between would drop variables whose names it does not like.)"""
    return _START[shell]


def script_bytes(script: str, last: int, *, shadowed: bool) -> bytes:
    """What the shell sources. One line comes first where a POSIX mode that is not the script's is to end."""
    head = ""
    if shadowed:
        head = f"case ${{POSIXLY_CORRECT-}} in {_MARK}) \\unset -v POSIXLY_CORRECT;; esac; {_restore(last)}\n"
    return f"{head}{script}\n".encode("utf-8", "surrogateescape")


def _restore(last: int) -> str:
    """Sets `$?` without a command that can be replaced; the first of two that are joined by && is no failure."""
    return f"( POSIXLY_CORRECT=1; \\exit {last} ) && x" if last else ""


def run_lines(
    holder: int, number: int, last: int, *, bash: bool, shadowed: bool, stdin: bool, terminal: bool
) -> tuple[str, str]:
    """The two lines of a run.

    Args:
        holder: its process number, inside.
        number: of this run.
        last: what the script is to find in `$?`.
        shadowed: `.` has become a function.
        stdin: the holder has one.
        terminal: the streams are the controlling terminal.
    """
    held = f"/proc/{holder}/fd/"
    source = f"\\. {held}{FIRST_HELD}"
    if terminal:
        source += " <&1 >&0 2>&0"  # for the shell, 1 is the terminal
    else:
        source += f" <{f'{held}{FIRST_HELD + 1}' if stdin else '/dev/null'}"
        source += f" >|{held}{FIRST_HELD + 2} 2>|{held}{FIRST_HELD + 3}"
    if shadowed:
        source = f"case :$SHELLOPTS: in *:posix:*) ;; *) POSIXLY_CORRECT={_MARK};; esac; {source}"
    elif last:
        source = f"{_restore(last)}; {source}"
    answer = f"\\printf '{number} %s\\n'"
    if not bash:
        return source, f'( \\set -- "$?"; \\unset -f printf; {answer} "$1" ) >&0'
    clear = 'POSIXLY_CORRECT=$?; \\set -- "$POSIXLY_CORRECT"; \\unset -f declare printf set; \\unset -v POSIXLY_CORRECT'
    look = '\\declare -F . >/dev/null && \\set -- "$1" .'
    return source, f'( {clear}; {look}; {answer} "$1${{2:+ .}}" ) >&0'


def parse_report(packet: bytes) -> Report | None:
    """The report in a packet; None for what no shell says by itself."""
    found = _REPORT.fullmatch(packet)
    if found is None or int(found[2]) > 255:
        return None
    return Report(int(found[1]), int(found[2]), found[3] is not None)


def parse_env(environ: bytes) -> dict[str, str]:
    """The variables of `READ_ENV`'s output, without those that are the shell's own doing."""
    found: dict[str, str] = {}
    for entry in environ.split(b"\0"):
        name, equals, value = entry.decode("utf-8", "surrogateescape").partition("=")
        if name and equals and name != "_" and (name, value) != ("POSIXLY_CORRECT", _MARK):
            found[name] = value
    return found
