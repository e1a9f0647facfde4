"""From command-line values to a ready engine: reads the model and sizes the cache.

Invariant: the cache's reservation is known and checked against the machine's memory before anything is
served; every wrong value is a ConfigError that says what would be right.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import torch

from learner.hf import load_decoder
from learner.model import Decoder, DecoderConfig
from learner.serve.engine import InferenceEngine
from rollout.errors import ConfigError

DEFAULT_MAX_BATCH = 256
DEFAULT_MAX_LEN = 2048
DEFAULT_CACHE_SHARE = 0.25
"""Part of the machine's memory that the default `max_batch` may reserve for the cache."""


def load_engine(
    *, model: Path | None, builtin: Path | None, dtype: str, max_batch: int | None, max_len: int | None, seed: int
) -> InferenceEngine:
    """Loads a Hugging Face folder (`model`) or builds a decoder (`builtin`), with its cache.

    Raises:
        ConfigError: the model cannot be read, or the cache would not fit.
    """
    parameter_dtype = getattr(torch, dtype)
    if model is not None:
        decoder = load_decoder(model, max_len=max_len or DEFAULT_MAX_LEN, dtype=parameter_dtype)
    else:
        assert builtin is not None
        decoder = build_decoder(builtin, parameter_dtype)
    context = max_len or min(decoder.config.max_len, DEFAULT_MAX_LEN)
    if not 2 <= context <= decoder.config.max_len:
        raise ConfigError("max_len", context, f"must lie in [2, {decoder.config.max_len}], the model's limit")
    rows = choose_rows(decoder.config, context, parameter_dtype.itemsize, max_batch)
    return InferenceEngine(decoder, max_batch=rows, max_len=context, seed=seed)


def build_decoder(path: Path, dtype: torch.dtype) -> Decoder:
    """Builds the decoder that a JSON file describes: the fields of `DecoderConfig`, and `seed`.

    Raises:
        ConfigError: the file cannot be read, or a field is unknown or wrong.
    """
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
        seed = int(raw.pop("seed", 0))
        config = msgspec.convert(raw, DecoderConfig)
    except (OSError, ValueError, AttributeError, msgspec.ValidationError) as error:
        raise ConfigError("builtin", str(path), f"must be a JSON object of decoder sizes: {error}") from error
    decoder = Decoder(config, seed=seed)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)
    return decoder


def choose_rows(config: DecoderConfig, max_len: int, itemsize: int, max_batch: int | None) -> int:
    """Rows of the cache: as asked if they fit, else `DEFAULT_MAX_BATCH` or what a quarter of the memory holds.

    Raises:
        ConfigError: the rows that were asked for are more than the machine's memory.
    """
    row_bytes = 2 * config.layers * config.kv_heads * max_len * config.head_dim * itemsize
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if max_batch is None:
        return max(1, min(DEFAULT_MAX_BATCH, int(memory_bytes * DEFAULT_CACHE_SHARE) // row_bytes))
    if max_batch * row_bytes > memory_bytes:
        most = max(1, memory_bytes // row_bytes)
        remedy = f"the cache would take {max_batch * row_bytes >> 20} MiB; use at most {most}, or a smaller max_len"
        raise ConfigError("max_batch", max_batch, remedy)
    return max_batch
