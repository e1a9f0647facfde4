"""Makes a copied executable find its shared library beside itself, by editing its run path in place.

Owns: nothing; one pure edit of bytes. Invariant: the file keeps its size and layout, since the new string is
never longer than the one it replaces; anything unexpected leaves the bytes as they were.
Format: System V ABI, "Dynamic Section" (64-bit little-endian objects only).
"""

from __future__ import annotations

import struct

_DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 5, 15, 29
_PT_LOAD, _PT_DYNAMIC = 1, 2


def replace_run_path(data: bytearray, replacement: bytes = b"$ORIGIN/../lib") -> bool:
    """Overwrite every DT_RPATH/DT_RUNPATH string of a 64-bit little-endian ELF object.

    Returns True when all of them (at least one) were replaced, False when there is none, when one is
    too short to hold `replacement`, or when `data` is another kind of object; then `data` is unchanged.
    """
    try:
        spans = _run_paths(data)
    except (struct.error, OverflowError):  # truncated or corrupt
        return False
    if any(end - start < len(replacement) for start, end in spans):
        return False
    for start, end in spans:
        data[start:end] = replacement.ljust(end - start, b"\0")
    return bool(spans)


def _run_paths(data: bytearray) -> list[tuple[int, int]]:
    """Start and end of each run path string in the file."""
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    (offset,) = struct.unpack_from("<Q", data, 0x20)
    entry_size, count = struct.unpack_from("<HH", data, 0x36)
    loads: list[tuple[int, int, int]] = []
    dynamic = b""
    for index in range(count):
        kind, _, file_offset, address, _, size = struct.unpack_from("<IIQQQQ", data, offset + index * entry_size)
        if kind == _PT_LOAD:
            loads.append((address, file_offset, size))
        elif kind == _PT_DYNAMIC:
            dynamic = bytes(data[file_offset : file_offset + size // 16 * 16])
    entries = list(struct.iter_unpack("<QQ", dynamic))
    table = next((_file_offset(loads, value) for tag, value in entries if tag == _DT_STRTAB), None)
    if table is None:
        return []
    starts = [table + value for tag, value in entries if tag in (_DT_RPATH, _DT_RUNPATH)]
    return [(start, data.find(b"\0", start)) for start in starts]


def _file_offset(loads: list[tuple[int, int, int]], address: int) -> int | None:
    """Where a virtual address lies in the file; None when no loaded segment holds it."""
    for start, file_offset, size in loads:
        if start <= address < start + size:
            return file_offset + address - start
    return None
