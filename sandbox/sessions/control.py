"""The socket over which a session's shell gets its lines and says that a run is over.

Owns: the engine's end. Invariant: what comes is one well-formed report at a time or the end of the conversation:
whoever says anything else has got hold of the shell's own descriptor, and nothing that comes after is read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from sandbox.sessions.dialect import Report, parse_report

_PACKET_BYTES = 64


class Control:
    """One end of a socket of packets.

    Args:
        end: owned from now on.
        on_report: told what the shell says; must not block.
        on_nonsense: told once that something else came.
    """

    def __init__(
        self, end: socket.socket, on_report: Callable[[Report], None], on_nonsense: Callable[[], None]
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._on_report = on_report
        self._on_nonsense = on_nonsense
        self._loop = asyncio.get_running_loop()
        self._reading = True
        self._loop.add_reader(end.fileno(), self._readable)

    def say(self, *lines: str) -> None:
        """Sends lines, one packet each; they are lost where nobody listens any more (or listens to nothing)."""
        with suppress(OSError):
            for line in lines:
                self._socket.send(f"{line}\n".encode())

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(_PACKET_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._stop_reading()
            return
        report = parse_report(packet)
        if report is None:
            self._stop_reading()
            self._on_nonsense()
        else:
            self._on_report(report)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def close(self) -> None:
        """Ends the conversation; idempotent."""
        self._stop_reading()
        self._socket.close()

    def disown(self) -> list[int]:
        """See `sandbox.protocol.forks`."""
        self._reading = False
        return [] if self._socket.fileno() < 0 else [self._socket.fileno()]
