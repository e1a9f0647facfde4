"""The program that runs a task author's test code, in a sandbox that no submission ever enters.

Owns the judging of `CodeTests`. A server that forks: each job is a child with its own memory, so
imports (numpy: 0.1 s) are paid once and no job sees another's state. Invariant: nothing of
the graded code is executed here; the candidate's answers are decoded to builtin values.

Descriptor 3 is a SEQPACKET socket. Each message is a job: text `<seconds> <bytes> <module to preload>…` (the job's
own limits of time and memory), with two descriptors: the candidate's channel (see `candidate`) and the job's own
stream, on which go
    in  ["job", setup, snippets, entry points, mutates, max bytes]
    out ["started"] once the setup has run; ["test", index, passed, detail] for each snippet, in order;
        ["done", why the candidate is gone or ""] | ["broken", text] when the author's setup failed, or a test
        needs what is not here
A message with one descriptor, a socket, asks whether the server is alive: it answers there with `ready`.

Whose failure it is: until "started", and where a test cannot run here at all, the author's or ours ("broken"). After
"started" everything else is a failed test, running out of memory included: the candidate's data may have caused it.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator

from rollout.verify.guest.codec import CodecError, Listed, Opaque, bounded_text, decode, encode
from rollout.verify.guest.messages import candidate_message

_MAX_JOB = 1 << 26
_MAX_DETAIL = 2000
_MAX_RANGE = 1_000_000
"""A test may make a list of what it gets."""
_FRAME_HEADER = 4


class CandidateError(Exception):
    """The candidate raised something that has no builtin exception type that is safe to raise here."""


class CandidateGone(BaseException):
    """The candidate ended, or broke the protocol. No test can pass any more; author code must not catch it."""


class Stream:
    """Frames of encoded values over a stream socket."""

    def __init__(
        self, sock: socket.socket, max_bytes: int, open_listed: Callable[[Listed], object] | None = None
    ) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._max_bytes = max_bytes
        self._open_listed = open_listed

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def receive(self) -> list[object]:
        """The next frame; EOFError when the peer is gone, CodecError when it is no frame."""
        size = int.from_bytes(self._read(_FRAME_HEADER), "big")
        if size > self._max_bytes:
            raise CodecError(f"a frame of {size} bytes")
        frame = decode(self._read(size), open_listed=self._open_listed, max_range=_MAX_RANGE)
        if not isinstance(frame, list):
            raise CodecError("a frame that is no list")
        return frame

    def end_with_peer(self) -> None:
        """From now on, the peer's closing its end (or a word from it) ends this process, whatever it is busy with.

        SIGIO does it, which nobody handles: a job that hostile data keeps busy must not outlive its verdict.
        """
        descriptor = self._sock.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)

    def send(self, frame: list[object]) -> None:
        """Sends one frame, whatever its size."""
        payload = encode(frame, _MAX_JOB, iterators=True)
        self._sock.sendall(len(payload).to_bytes(_FRAME_HEADER, "big") + payload)


class Proxies:
    """Stands for the candidate's functions in the tests' namespace."""

    def __init__(self, stream: Stream, mutates: bool) -> None:
        self._stream = stream
        self._mutates = mutates
        self._number = 0
        self.gone = ""
        self.raised: Exception | None = None
        """The last exception that was raised on the candidate's behalf."""
        self.last_call: list[object] = []
        """Name, arguments, what it did, and the result of the last call; put into words only where a test fails."""

    def function(self, name: str) -> object:
        """A function that asks the candidate for `name`."""

        def proxy(*arguments: object) -> object:
            return self.call(name, list(arguments))

        proxy.__name__ = proxy.__qualname__ = name
        return proxy

    def call(self, name: str, arguments: list[object]) -> object:
        """One call: the result as builtin values, or the exception as one of its builtin type."""
        if self.gone:
            raise CandidateGone(self.gone)
        self._number += 1
        number = self._number
        self.last_call = [name, arguments]
        try:
            self._stream.send(["call", number, name, arguments, self._mutates])
            kind, answered, value, more = self._answer()
            if answered != number:
                raise CodecError("an answer to no question")
        except (EOFError, OSError):
            self.gone = "ended"
            raise CandidateGone(self.gone) from None
        except CodecError as error:
            self.gone = f"protocol: the program sent {error}"
            raise CandidateGone(self.gone) from None
        except MemoryError:
            self.gone = "protocol: the program sent more than the judge can hold"
            raise CandidateGone(self.gone) from None
        if kind == "result":
            return self._result(value, more, arguments)
        assert isinstance(value, str)
        assert isinstance(more, str)
        return self._error(value, more)

    def _answer(self) -> list[object]:
        message = candidate_message(self._stream.receive())
        if message[0] not in ("result", "error"):
            raise CodecError("an answer to no question")
        return message

    def told(self) -> str:
        """The last call in words."""
        if not self.last_call:
            return ""
        name, arguments, *rest = self.last_call
        assert isinstance(arguments, list)
        call = f"{name}({', '.join(map(bounded_text, arguments))})"
        if rest and rest[0] == "returned":
            return f"{call} returned {bounded_text(rest[1])}"
        return f"{call} raised {rest[1]}: {rest[2]}" if rest else call

    def _result(self, value: object, mutated: object, arguments: list[object]) -> object:
        if self._mutates and isinstance(mutated, list) and len(mutated) == len(arguments):
            for mine, theirs in zip(arguments, mutated, strict=True):
                _assign(mine, theirs)
        self.last_call += ["returned", value]
        return value

    def _error(self, type_name: str, text: str) -> object:
        self.last_call += ["raised", type_name, text]
        kind = getattr(builtins, type_name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _UNSAFE):
            self.raised = kind(text)
        else:
            self.raised = CandidateError(f"{type_name}: {text}")
        raise self.raised


_UNSAFE = (UnicodeError, StopIteration, StopAsyncIteration, ExceptionGroup)
"""Not made from one text, or with a meaning to the interpreter."""


def _assign(mine: object, theirs: object) -> None:
    """Makes a mutable argument what the candidate made of it."""
    if isinstance(mine, list) and isinstance(theirs, list):
        mine[:] = theirs
    elif (isinstance(mine, dict) and isinstance(theirs, dict)) or (isinstance(mine, set) and isinstance(theirs, set)):
        mine.clear()
        mine.update(theirs)


def _iterate(listed: Listed) -> Iterator[object]:
    """An iterator of the candidate as an iterator here."""
    for item in listed.items:
        if isinstance(item, Opaque) and not listed.complete and item is listed.items[-1]:
            raise CandidateError(item.text)
        yield item
    if not listed.complete:
        raise CandidateError("the iterator is too long")


_BROKEN_TEST = (ImportError, SyntaxError)
"""Raised by test code itself, these say that the test cannot run here; the candidate is not judged by it."""


class BrokenTestError(Exception):
    """A test cannot run here, whatever the candidate is."""


def _test(snippet: str, namespace: dict[str, object], proxies: Proxies) -> tuple[bool, str]:
    proxies.last_call = []
    try:
        exec(compile(snippet, "<test>", "exec", dont_inherit=True), namespace)
    except CandidateGone:
        return False, proxies.gone
    except BaseException as error:  # noqa: BLE001 - an author's test ends by any exception: that is its verdict
        if _is_broken(error, proxies):
            raise BrokenTestError(_described(error)) from None
        try:
            parts = (snippet.strip()[:600], _described(error), proxies.told())
            return False, "\n".join(part for part in parts if part)[:_MAX_DETAIL]
        except MemoryError:
            return False, "MemoryError"
    return (False, proxies.gone) if proxies.gone else (True, "")


def _is_broken(error: BaseException, proxies: Proxies) -> bool:
    """Whether the test itself cannot run here. A SyntaxError after a call may come of parsing the candidate's data."""
    if not isinstance(error, _BROKEN_TEST) or error is proxies.raised:
        return False
    of_the_test = isinstance(error, SyntaxError) and error.filename == "<test>"
    return isinstance(error, ImportError) or of_the_test or not proxies.last_call


def _described(error: BaseException) -> str:
    """Type and text of an exception that may hold the candidate's data. Never raises."""
    text = bounded_text(error, str, 500)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _prepare(candidate: socket.socket, stream: Stream) -> tuple[list[object], dict[str, object], Proxies]:
    """Runs the author's setup: the snippets, their namespace, and the candidate's functions in it."""
    _, setup, snippets, entry_points, mutates, max_bytes = stream.receive()
    stream.end_with_peer()
    assert isinstance(setup, str)
    assert isinstance(snippets, list)
    assert isinstance(entry_points, list)
    assert isinstance(max_bytes, int)
    proxies = Proxies(Stream(candidate, max_bytes, _iterate), bool(mutates))
    module = type(sys)("tests")
    sys.modules["tests"] = module
    namespace = module.__dict__
    exec(compile(setup, "<setup>", "exec", dont_inherit=True), namespace)
    namespace.update((name, proxies.function(name)) for name in entry_points)
    return snippets, namespace, proxies


def _child(message: bytes, candidate: socket.socket, stream_socket: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    lifetime_s, memory_bytes = message.split()[:2]
    signal.setitimer(signal.ITIMER_REAL, float(lifetime_s))
    stream = Stream(stream_socket, _MAX_JOB)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
        snippets, namespace, proxies = _prepare(candidate, stream)
    except BaseException as error:  # noqa: BLE001 - the author's setup failed: not the candidate's doing
        stream.send(["broken", _described(error)])
        return
    stream.send(["started"])
    try:
        for index, snippet in enumerate(snippets):
            assert isinstance(snippet, str)
            stream.send(["test", index, *_test(snippet, namespace, proxies)])
    except BrokenTestError as error:
        stream.send(["broken", str(error)])
        return
    stream.send(["done", proxies.gone])


def main() -> None:
    """Serves jobs until the control socket closes."""
    sys.path.append(f"{sys.prefix}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages")
    control = socket.socket(fileno=3)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
        if not message:
            return
        if len(descriptors) == 1:
            with socket.socket(fileno=descriptors[0]) as asker, contextlib.suppress(OSError):
                asker.send(b"ready")
            continue
        for name in message.split()[2:]:
            with contextlib.suppress(ImportError):  # a test that needs it will say so
                __import__(name.decode())
        candidate, stream = (socket.socket(fileno=fd) for fd in descriptors)
        if os.fork() == 0:
            control.close()
            try:
                _child(message, candidate, stream)
            finally:
                os._exit(0)
        candidate.close()
        stream.close()


if __name__ == "__main__":
    main()
