"""What a candidate may say, checked where it is received: by the engine, and (as text) by the judge in its sandbox.

Invariant: whoever reads a message that has passed here meets no field of a type that it did not expect.
"""

from __future__ import annotations

from rollout.verify.guest.codec import CodecError

MAX_TEXT = 2000
"""Of one text in a candidate's message."""


def candidate_message(frame: object) -> list[object]:
    """`frame`, when it is a message that a candidate may send, every field of the type that it should have.

    Raises `CodecError` for anything else. Texts are cut to `MAX_TEXT` characters. The value
    of a result alone stays whatever plain data it is.
    """
    if isinstance(frame, list) and frame and isinstance(frame[0], str):
        kind, fields = frame[0], frame[1:]
        types = tuple(map(type, fields))
        if kind == "loaded" and not fields:
            return frame
        if kind == "result" and len(fields) == 3 and types[0] is int:
            return frame
        if (kind == "failed" and types == (str, str)) or (kind == "error" and types == (int, str, str)):
            return [kind, *(field[:MAX_TEXT] if isinstance(field, str) else field for field in fields)]
    raise CodecError("a message of no known form")
