"""The program that holds a submission in a fresh sandbox and answers calls to it.

Owns nothing that matters: everything here shares its interpreter with the submission and may be
taken over by it. That is harmless, since no expected value ever comes here; whatever is
answered is a claimed result that others compare. Standard library only, and little of it, since its start
is most of a small verdict's time.

Frames on descriptor 3 (4-byte big-endian length, then one encoded value), each a list:
    out ["ready"]                            before anything of the submission is known
    in  ["load", source, max_bytes, iterators, cpu_s]
    out ["loaded"] | ["failed", type, text]
    in  ["limit", cpu_s]                     CPU seconds from now on; over them, SIGPROF ends the process
    in  ["call", id, name, arguments, mutates]
    out ["result", id, value, arguments or None] | ["error", id, type, text]
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import posix
import sys

from rollout.verify.guest.codec import CodecError, Listed, decode, encode

_CHANNEL = 3
_NAME = "submission"
_MAX_FRAME = 1 << 26
_MAX_TEXT = 500


def _read(size: int) -> bytes:
    parts = []
    while size:
        part = posix.read(_CHANNEL, min(size, 1 << 20))
        if not part:
            posix._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _receive() -> list[object]:
    size = int.from_bytes(_read(4), "big")
    if size > _MAX_FRAME:
        posix._exit(0)
    frame = decode(_read(size))
    assert isinstance(frame, list)
    return frame


def _send(payload: bytes) -> None:
    data = memoryview(len(payload).to_bytes(4, "big") + payload)
    while data:
        data = data[posix.write(_CHANNEL, data) :]


def _place(error: BaseException, lines: list[str]) -> str:
    """Where in the submission the error came from: the innermost frame of its own."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename == "<submission>":
            line = lines[trace.tb_lineno - 1].strip() if 0 < trace.tb_lineno <= len(lines) else ""
            place = f" (line {trace.tb_lineno}, in {code.co_name}: {line})"
        trace = trace.tb_next
    return place


def _describe(error: BaseException, lines: list[str]) -> list[str]:
    """The error's builtin type name (the first of its bases that is one), and a bounded text."""
    kind = next((base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins"), "Exception")
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - a broken __str__ of the submission's own exception
        text = "<unprintable>"
    own = "" if type(error).__name__ == kind else type(error).__name__ + ": "
    return [kind, (own + text)[:_MAX_TEXT] + _place(error, lines)[:_MAX_TEXT]]


def _limit(cpu_s: object) -> None:
    """A submission may lift this; the sandbox's own limits stand behind it."""
    assert isinstance(cpu_s, float)
    _signal.setitimer(_signal.ITIMER_PROF, cpu_s)


def _load(source: str) -> dict[str, object]:
    """Runs the submission as a module of its own."""
    sys.path.append(f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
    module = type(sys)(_NAME)
    sys.modules[_NAME] = module
    exec(compile(source, "<submission>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _answer(
    frame: list[object], namespace: dict[str, object], lines: list[str], max_bytes: int, iterators: bool
) -> bytes:
    _, number, name, arguments, mutates = frame
    assert isinstance(arguments, list)
    arguments = [iter(item.items) if isinstance(item, Listed) else item for item in arguments]
    try:
        if name not in namespace:
            raise NameError(f"name {name!r} is not defined")
        result = namespace[name](*arguments)  # type: ignore[operator]
        return encode(["result", number, result, arguments if mutates else None], max_bytes, iterators)
    except CodecError as error:
        return encode(["error", number, "ValueError", f"the result cannot be sent: {error}"])
    except BaseException as error:  # noqa: BLE001 - whatever the submission raises, SystemExit included, is its answer
        return encode(["error", number, *_describe(error, lines)])


def main() -> None:
    """Serves one submission until the channel closes."""
    _send(encode(["ready"]))
    _, source, max_bytes, iterators, cpu_s = _receive()
    assert isinstance(source, str)
    assert isinstance(max_bytes, int)
    lines = source.split("\n")
    _limit(cpu_s)
    try:
        namespace = _load(source)
    except BaseException as error:  # noqa: BLE001 - a submission that does not load: its own failure
        _send(encode(["failed", *_describe(error, lines)]))
        return
    _send(encode(["loaded"]))
    while True:
        frame = _receive()
        if frame[0] == "limit":
            _limit(frame[1])
        else:
            _send(_answer(frame, namespace, lines, max_bytes, bool(iterators)))


if __name__ == "__main__":
    main()
