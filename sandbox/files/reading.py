"""How a stream of records is taken apart as it comes; both formats of trees do it so.

Owns: the bytes that are not complete yet. Invariant: a step asks for so many bytes and is sent exactly those; a file's
blocks are no longer than a block may be, and together no longer than the file claimed.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Generic, TypeVar

from sandbox.errors import ProtocolError

BLOCK_BYTES = 65536
HEADER = struct.Struct("<IHHIIQq")
LENGTH = struct.Struct("<I")
END_OF_FILE = LENGTH.pack(0)

Item = TypeVar("Item")
"""A format's own checked record."""


class StepReader(ABC, Generic[Item]):
    """Takes bytes as they come and gives what is complete; holds less than one block and one record of them."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._events: list[Item | bytes | None] = []
        self._steps = self._read()
        self._wanted = next(self._steps)

    @abstractmethod
    def _read(self) -> Generator[int, bytes, None]:
        """Asks for so many bytes, and is sent them; without end. What it finds goes to `_events`."""

    def take(self, data: bytes) -> list[Item | bytes | None]:
        """What is complete now: records, pieces of the last file's content, and None for that file's end.

        Raises:
            ProtocolError: the bytes break the format.
        """
        self._buffer += data
        at = 0
        while self._wanted <= len(self._buffer) - at:
            part = bytes(self._buffer[at : at + self._wanted])
            at += self._wanted
            self._wanted = self._steps.send(part)
        del self._buffer[:at]
        events, self._events = self._events, []
        return events

    def _read_content(self, left: int) -> Generator[int, bytes, None]:
        while length := LENGTH.unpack((yield LENGTH.size))[0]:
            if length > BLOCK_BYTES or length > left:
                raise ProtocolError(f"a block of {length} bytes where {left} may follow")
            left -= length
            block = yield length  # first: the list is another one afterwards
            self._events.append(block)
        self._events.append(None)
