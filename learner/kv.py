"""The key-value cache: a fixed block of rows, one generating sequence per row.

Memory is bounded by `num_rows` × `max_len`, reserved once; pages that no sequence has reached
stay untouched. Live rows are kept compact (0 … n-1) by the caller, so that attention reads one
strided view of exactly the live rows and the live length, without gathering.

Invariants: entries of a row at positions below its length are those of its sequence; whatever lies
above has no weight in attention, but is finite, since zero times infinity would spoil a sum.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class KVCache:
    """Keys and values of `num_rows` sequences, [layers, rows, kv_heads, max_len, head_dim] each."""

    def __init__(
        self, *, layers: int, num_rows: int, kv_heads: int, max_len: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        shape = (layers, num_rows, kv_heads, max_len, head_dim)
        self.keys = _untouched_zeros(shape, dtype)
        self.values = _untouched_zeros(shape, dtype)
        self.num_rows = num_rows
        self.max_len = max_len
        self._rows = torch.arange(num_rows)

    @property
    def nbytes(self) -> int:
        """Size of the whole reservation."""
        return self.keys.nbytes + self.values.nbytes

    def write_span(
        self, layer: int, first_row: int, rows: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stores [R, K, T, d] at positions `start`… of `rows` rows; returns views of all their entries so far."""
        end = start + keys.shape[2]
        span = slice(first_row, first_row + rows)
        self.keys[layer, span, :, start:end] = keys
        self.values[layer, span, :, start:end] = values
        return self.keys[layer, span, :, :end], self.values[layer, span, :, :end]

    def write_one(self, layer: int, lengths: Tensor, live: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [R, K, 1, d] at position `lengths[r]` of row r; returns [R, K, live, d] views."""
        rows = lengths.shape[0]
        at = self._rows[:rows]
        self.keys[layer, at, :, lengths] = keys[:, :, 0]
        self.values[layer, at, :, lengths] = values[:, :, 0]
        return self.keys[layer, :rows, :, :live], self.values[layer, :rows, :, :live]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one row over another's."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def clear(self, row: int) -> None:
        """Sets a row back to zeros; needed where what it holds is not finite."""
        self.keys[:, row] = 0
        self.values[:, row] = 0


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages take no memory until they are written, unlike those of `torch.zeros`."""
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)
