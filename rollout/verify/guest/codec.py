"""Plain data to bytes and back: the only thing that crosses from graded code to those who judge it.

Owns the byte format. Runs on both sides: in the engine, and (as text, without imports from the
project) inside sandboxes. Invariants: `decode` makes builtin values only, runs no code of the
sender's choosing, never reads past `max_bytes`, never nests deeper than `MAX_DEPTH`; what is not
plain data arrives as an `Opaque`, which equals nothing. Subclasses of builtin types are flattened
to their base by calling the base's own methods, so overridden operators have no effect.

A value is one tag byte and a body; lengths and counts are 4 bytes, big-endian; floats are their hexadecimal text.
A format of its own that imports nothing, since importing `json` doubles the start of an interpreter.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` itself would be a slow import
    from collections.abc import Callable

MAX_DEPTH = 64
MAX_REPR = 200
MAX_ITEMS = 100_000
"""Items taken from one iterator."""


class CodecError(ValueError):
    """The bytes are no value of this format, or break a bound; or a value is too large to encode."""


class Opaque:
    """What was no plain data: its type's name and a bounded text. Equal to nothing, itself included."""

    __slots__ = ("text", "type_name")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, type_name: str, text: str) -> None:
        self.type_name = type_name
        self.text = text

    def __eq__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return self.text


class Listed:
    """An iterator's items, in order; `complete` is False when it was cut off or raised."""

    __slots__ = ("complete", "items")

    def __init__(self, items: list[object], complete: bool) -> None:
        self.items = items
        self.complete = complete

    def __repr__(self) -> str:
        return f"iterator of {self.items!r}"


KINDS = {"e": "set", "E": "frozenset", "d": "dict"}


class Unhashed:
    """A set (`kind` "e"), frozenset ("E") or dict ("d", items are pairs) whose items were never hashed.

    Hashing values of a hostile sender's choosing can take quadratic time.
    """

    __slots__ = ("items", "kind")

    def __init__(self, kind: str, items: list[object]) -> None:
        self.kind = kind
        self.items = items

    def __repr__(self) -> str:
        return f"{KINDS[self.kind]} of {self.items!r}"


class Encoder:
    """Encodes one value at a time.

    Args:
        max_bytes: bound of one encoded value; more raises `CodecError`.
        iterators: list iterators and views (as `Listed`) instead of making them opaque.
    """

    def __init__(self, max_bytes: int, iterators: bool = False) -> None:
        self._max_bytes = max_bytes
        self._iterators = iterators
        self._parts: list[bytes] = []
        self._size = 0

    def encode(self, value: object) -> bytes:
        """The bytes of `value`."""
        self._parts, self._size = [], 0
        self._value(value, 0)
        return b"".join(self._parts)

    def _put(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._max_bytes:
            raise CodecError(f"the value is larger than {self._max_bytes} bytes")
        self._parts.append(part)

    def _text(self, tag: bytes, data: bytes) -> None:
        self._put(tag + int.to_bytes(len(data), 4, "big"))
        self._put(data)

    def _float(self, value: float) -> None:
        data = float.hex(value).encode()
        self._put(b"f" + int.to_bytes(len(data), 1, "big") + data)

    def _value(self, value: object, depth: int) -> None:
        if type(value) is str:  # the commonest kinds first, by exact type; `_scalar` does the same for subclasses
            self._text(b"s", value.encode("utf-8", "surrogatepass"))
        elif type(value) is int and -(1 << 63) <= value < 1 << 63:
            self._put(b"i" + value.to_bytes(8, "big", signed=True))
        elif depth > MAX_DEPTH:
            self._opaque(value)
        elif value is None:
            self._put(b"N")
        elif value is True or value is False:
            self._put(b"T" if value else b"F")
        elif not (self._scalar(value) or self._container(value, depth + 1)):
            self._opaque(value)

    def _scalar(self, value: object) -> bool:
        if isinstance(value, int):
            number = int.__add__(value, 0)
            if -(1 << 63) <= number < 1 << 63:
                self._put(b"i" + int.to_bytes(number, 8, "big", signed=True))
            else:
                size = int.bit_length(number) // 8 + 1
                if size > self._max_bytes:
                    raise CodecError(f"an int of {size} bytes")
                self._text(b"I", int.to_bytes(number, size, "big", signed=True))
        elif isinstance(value, float):
            self._float(value)
        elif isinstance(value, str):
            self._text(b"s", str.encode(value, "utf-8", "surrogatepass"))
        elif isinstance(value, complex):
            plain = complex.__add__(value, 0)
            self._put(b"c")
            self._float(plain.real)
            self._float(plain.imag)
        elif isinstance(value, (bytes, bytearray)):
            self._text(b"b" if isinstance(value, bytes) else b"B", bytes(memoryview(value)))
        else:
            return self._foreign_scalar(value)
        return True

    def _foreign_scalar(self, value: object) -> bool:
        """Scalars of numpy, as the Python scalars they stand for."""
        if type(value).__module__ != "numpy" or not hasattr(value, "dtype") or getattr(value, "ndim", 1) != 0:
            return False
        plain = value.item()  # type: ignore[attr-defined]
        if type(plain) not in (bool, int, float, complex, str, bytes):
            return False
        self._value(plain, MAX_DEPTH)
        return True

    def _container(self, value: object, depth: int) -> bool:
        if isinstance(value, (list, tuple)) and self._small_ints(value):
            return True
        if isinstance(value, list):
            self._items(b"l", list.__iter__(value), list.__len__(value), depth)
        elif isinstance(value, tuple):
            self._items(b"t", tuple.__iter__(value), tuple.__len__(value), depth)
        elif isinstance(value, set):
            self._items(b"e", set.__iter__(value), set.__len__(value), depth)
        elif isinstance(value, frozenset):
            self._items(b"E", frozenset.__iter__(value), frozenset.__len__(value), depth)
        elif isinstance(value, dict):
            self._put(b"d" + int.to_bytes(dict.__len__(value), 4, "big"))
            for key, item in dict.items(value):
                self._value(key, depth)
                self._value(item, depth)
        elif isinstance(value, range):
            self._put(b"r")
            for number in (value.start, value.stop, value.step):
                self._scalar(number)
        elif type(value).__name__ == "deque" and type(value).__module__ == "collections":
            self._items(b"l", iter(list(value)), len(value), depth)  # type: ignore[call-overload, arg-type]
        elif isinstance(value, Listed):
            self._items(b"G" if value.complete else b"g", iter(value.items), len(value.items), depth)
        elif self._iterators and (hasattr(type(value), "__next__") or type(value) in _VIEWS):
            self._iterator(value, depth)
        else:
            return False
        return True

    def _small_ints(self, value: object) -> bool:
        """Packs a list or tuple of nothing but small ints, of which test data is full, one byte each."""
        items = list(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value))  # type: ignore[arg-type]
        if set(map(type, items)) != {int} or min(items) < -128 or max(items) > 127:
            return False
        self._text(b"L" if isinstance(value, list) else b"U", bytes([item & 255 for item in items]))
        return True

    def _items(self, tag: bytes, items: object, count: int, depth: int) -> None:
        self._put(tag + int.to_bytes(count, 4, "big"))
        for item in items:  # type: ignore[attr-defined]
            self._value(item, depth)

    def _iterator(self, value: object, depth: int) -> None:
        items: list[object] = []
        complete = False
        try:
            for item in value:  # type: ignore[attr-defined]
                if len(items) >= MAX_ITEMS:
                    break
                items.append(item)
            else:
                complete = True
        except Exception as error:  # noqa: BLE001 - whatever graded code raises while it is iterated
            items.append(Opaque(type(error).__name__, bounded_text(error)))
        self._items(b"G" if complete else b"g", iter(items), len(items), depth)

    def _opaque(self, value: object) -> None:
        is_opaque = isinstance(value, Opaque)
        name = value.type_name if is_opaque else type(value).__name__  # type: ignore[attr-defined]
        text = value.text if is_opaque else bounded_text(value)  # type: ignore[attr-defined]
        self._put(b"o")
        self._text(b"s", name[:MAX_REPR].encode("utf-8", "replace"))
        self._text(b"s", text[:MAX_REPR].encode("utf-8", "replace"))


_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def bounded_text(value: object, show: Callable[[object], str] = repr, length: int = MAX_REPR) -> str:
    """What `show` makes of a value that may come from anyone, cut to `length` characters. Never raises.

    Not even for an int with too many digits to print, nor where memory is short.
    """
    try:
        text = show(value)
        return text if len(text) <= length else text[: length - 1] + "…"
    except BaseException as error:  # noqa: BLE001 - a lying or broken __repr__ of graded code
        return f"<unprintable {type(value).__name__}: {type(error).__name__}>"


class _Decoder:
    __slots__ = ("data", "hashed", "max_range", "open_listed", "position")

    def __init__(
        self, data: bytes, hashed: bool, open_listed: Callable[[Listed], object] | None, max_range: int | None
    ) -> None:
        self.data = data
        self.hashed = hashed
        self.open_listed = open_listed
        self.max_range = max_range
        self.position = 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.data):
            raise CodecError(f"cut off at byte {self.position}")
        part = self.data[self.position : end]
        self.position = end
        return part

    def length(self) -> int:
        """A length or count; each item has at least one byte, so more than what is left is a lie."""
        length = int.from_bytes(self.take(4), "big")
        if length > len(self.data) - self.position:
            raise CodecError(f"a count of {length} at byte {self.position}")
        return length

    def value(self, depth: int) -> object:
        if depth > MAX_DEPTH + 1:
            raise CodecError(f"nested deeper than {MAX_DEPTH}")
        tag = self.take(1)
        if tag == b"i":
            return int.from_bytes(self.take(8), "big", signed=True)
        if tag == b"s":
            return self.text()
        if tag == b"l":
            return self.items(depth)
        if tag == b"t":
            return tuple(self.items(depth))
        if tag == b"L":
            return self.small_ints()
        if tag == b"U":
            return tuple(self.small_ints())
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag == b"f":
            return self.real()
        if tag == b"d":
            return self.mapping(depth)
        return self.rare(tag, depth)

    def rare(self, tag: bytes, depth: int) -> object:
        if tag == b"I":
            return int.from_bytes(self.take(self.length()), "big", signed=True)
        if tag in (b"b", b"B"):
            data = self.take(self.length())
            return data if tag == b"b" else bytearray(data)
        if tag == b"c":
            return self.complex_number()
        if tag in (b"e", b"E"):
            return self.unordered(tag, depth)
        if tag == b"r":
            return self.range()
        if tag in (b"G", b"g"):
            listed = Listed(self.items(depth), tag == b"G")
            return self.open_listed(listed) if self.open_listed else listed
        if tag == b"o":
            name, text = self.value(MAX_DEPTH), self.value(MAX_DEPTH)
            if isinstance(name, str) and isinstance(text, str):
                return Opaque(name[:MAX_REPR], text[:MAX_REPR])
        raise CodecError(f"an unknown tag at byte {self.position}")

    def real(self) -> float:
        try:
            return float.fromhex(self.take(self.take(1)[0]).decode("ascii"))
        except (ValueError, OverflowError):
            raise CodecError(f"a float that is none at byte {self.position}") from None

    def complex_number(self) -> complex:
        real, imaginary = self.value(MAX_DEPTH), self.value(MAX_DEPTH)
        if isinstance(real, float) and isinstance(imaginary, float):
            return complex(real, imaginary)
        raise CodecError(f"a complex number that is none at byte {self.position}")

    def text(self) -> str:
        try:
            return self.take(self.length()).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise CodecError(f"a text that is no UTF-8 at byte {self.position}") from None

    def small_ints(self) -> list[int]:
        return memoryview(self.take(self.length())).cast("b").tolist()

    def items(self, depth: int) -> list[object]:
        return [self.value(depth + 1) for _ in range(self.length())]

    def unordered(self, tag: bytes, depth: int) -> object:
        items = self.items(depth)
        if not self.hashed:
            return Unhashed(tag.decode(), items)
        try:
            return set(items) if tag == b"e" else frozenset(items)
        except TypeError:
            return Opaque("set", "<a set of unhashable items>")

    def mapping(self, depth: int) -> object:
        pairs = [(self.value(depth + 1), self.value(depth + 1)) for _ in range(self.length())]
        if not self.hashed:
            return Unhashed("d", list(pairs))
        try:
            return dict(pairs)
        except TypeError:
            return Opaque("dict", "<a dict of unhashable keys>")

    def range(self) -> object:
        start, stop, step = (self.value(MAX_DEPTH) for _ in range(3))
        if isinstance(start, int) and isinstance(stop, int) and isinstance(step, int) and step:
            numbers = range(start, stop, step)
            if self.max_range is not None and numbers[self.max_range :]:
                return Opaque("range", bounded_text(numbers))
            return numbers
        raise CodecError(f"a range of no ints at byte {self.position}")


_CONSTANTS = {b"N": None, b"T": True, b"F": False}


def encode(value: object, max_bytes: int = 1 << 20, iterators: bool = False) -> bytes:
    """The bytes of `value`; raises `CodecError` when they are more than `max_bytes`."""
    return Encoder(max_bytes, iterators).encode(value)


def decode(
    data: bytes,
    hashed: bool = True,
    open_listed: Callable[[Listed], object] | None = None,
    max_range: int | None = None,
) -> object:
    """The value of `data`, which may come from anyone; raises `CodecError` unless it is exactly one value.

    Args:
        hashed: make real sets and dicts; else `Unhashed`, and the time is linear in the size of `data`.
        open_listed: makes of each `Listed`, at any depth, what is to stand for it.
        max_range: longer ranges, a few bytes that can be made into gigabytes, arrive as `Opaque`; None keeps all.
    """
    decoder = _Decoder(data, hashed, open_listed, max_range)
    value = decoder.value(0)
    if decoder.position != len(data):
        raise CodecError(f"{len(data) - decoder.position} bytes too many")
    return value
