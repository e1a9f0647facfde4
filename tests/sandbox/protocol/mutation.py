"""Broken frames from whole ones, by a seeded generator: the same seed gives the same bytes.

Invariant: most results keep the format's outer shape (lengths that add up), so that they reach what reads the items;
the rest break it anywhere.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence

from sandbox.protocol.wire import MAGIC, VERSION, decode

_HEADER = struct.Struct("<IHHII")
_ITEM = struct.Struct("<HHI")
_LENGTHS = (0, 1, 3, 4, 7, 8, 255, 65_535, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF8, 0xFFFFFFFF)
_NUMBERS = (0, 1, 2, 3, 4, 63, 64, 65, 100, 255, 4095, 4096, 65_535, 65_536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def _join(kind: int, ident: int, items: Sequence[tuple[int, bytes]]) -> bytes:
    body = b"".join(_ITEM.pack(tag, 0, len(value)) + value for tag, value in items)
    return _HEADER.pack(MAGIC, VERSION, kind, ident, len(body)) + body


def _bend(chance: random.Random, value: bytes) -> bytes:
    """Another value of an item: other bytes, a cut, an absurd number, a lost end, many times the same."""
    data = bytearray(value)
    match chance.randrange(7):
        case 0 if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 1 if data:
            del data[chance.randrange(len(data)) :]
        case 2:
            at = chance.randrange(max(1, len(data) - 3))
            data[at : at + 4] = struct.pack("<I", chance.choice(_NUMBERS))
        case 3 if data:
            data[-1] = chance.randrange(256)
        case 4:
            data += chance.randbytes(chance.randrange(1, 20))
        case 5 if data:
            data *= chance.choice((2, 3, 50))
        case _:
            data = bytearray()
    return bytes(data)


def _bend_items(
    chance: random.Random, items: list[tuple[int, bytes]], others: Sequence[tuple[int, bytes]]
) -> list[tuple[int, bytes]]:
    at = chance.randrange(len(items)) if items else 0
    match chance.randrange(6):
        case 0 if items:
            items[at] = (items[at][0], _bend(chance, items[at][1]))
        case 1 if items:
            items[at] = (chance.choice((chance.randrange(30), chance.randrange(65_536))), items[at][1])
        case 2 if items:
            items += [items[at]] * chance.choice((1, 1, 2, 300))
        case 3 if items:
            del items[at]
        case 4 if items:
            chance.shuffle(items)
        case _:
            items.insert(at, chance.choice(others))
    return items


def _break(chance: random.Random, frame: bytes) -> bytes:
    """Breaks the outer shape: flipped bits, a cut, junk, lengths that lie."""
    data = bytearray(frame)
    match chance.randrange(5):
        case 0:
            for _ in range(chance.randrange(1, 9)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        case 1:
            del data[chance.randrange(len(data)) :]
        case 2:
            at = chance.randrange(len(data))
            data[at:at] = chance.randbytes(chance.randrange(1, 40))
        case 3:
            at = chance.choice((12, 20, chance.randrange(max(1, len(data) - 3))))
            data[at : at + 4] = struct.pack("<I", chance.choice(_LENGTHS))
        case _:
            data = bytearray(chance.randbytes(chance.randrange(200)))
    return bytes(data)


def mutated(
    chance: random.Random, frames: Sequence[bytes], count: int, kinds: Sequence[int] = (), *, shaped: bool = False
) -> Iterator[bytes]:
    """That many broken frames.

    Args:
        frames: whole ones to start from; their items are spliced into each other.
        kinds: other kinds that a frame may pretend to be.
        shaped: keep the outer shape of all of them.
    """
    parsed = [decode(frame) for frame in frames]
    others = [item for frame in parsed for item in frame.items]
    for _ in range(count):
        base = chance.choice(parsed)
        items = list(base.items)
        for _ in range(chance.choice((0, 1, 1, 1, 2, 3, 6))):
            items = _bend_items(chance, items, others)
        kind = chance.choice(kinds) if kinds and chance.random() < 0.2 else base.kind
        ident = chance.choice((base.ident, base.ident, chance.randrange(1 << 32), chance.choice(_NUMBERS)))
        frame = _join(kind, ident, items)
        yield frame if shaped or chance.random() < 0.6 else _break(chance, frame)
