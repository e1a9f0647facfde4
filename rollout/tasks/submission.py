"""Finds the program in what a policy wrote.

The policy of this extraction, in one place: the *first* fenced code block, whatever its language tag; a block that is
never closed (the answer hit its token limit) reaches to the end; without any fence the whole text is the program.
An empty answer holds none.
"""

from __future__ import annotations

import re

_BLOCK = re.compile(r"```[a-zA-Z0-9]*[ ]*\n(.*?)(?:```|\Z)", re.DOTALL)


def extract_submission(text: str) -> str | None:
    """The program in `text`, or None when there is nothing but white space."""
    block = _BLOCK.search(text)
    program = block.group(1) if block else text
    return program if program.strip() else None
