"""Reads Hugging Face model folders (config.json + safetensors) of the Llama and Qwen2 architectures.

Invariant: a folder is either loaded exactly (every tensor used, every parameter filled) or
refused with an error that names the file, the field and what would be accepted. Nothing in the
folder is executed or unpickled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.model import Decoder, DecoderConfig
from rollout.errors import ConfigError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM")


def load_decoder(folder: Path, *, max_len: int | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    """Builds the decoder that a model folder describes and fills it with the folder's weights.

    Args:
        folder: holds `config.json` and `*.safetensors` (one file or shards).
        max_len: longest sequence in tokens; the model's own limit when None, and never above it.
        dtype: of the parameters; norms are computed in float32 whatever it is.

    Raises:
        ConfigError: the folder lacks a file, or the architecture or one of its options is not supported.
    """
    config = read_config(folder, max_len=max_len)
    decoder = Decoder(config, seed=None)
    for parameter in decoder.parameters():  # not `decoder.to`, which would round the rotary tables
        parameter.data = parameter.data.to(dtype)
    fill(decoder, read_tensors(folder), folder)
    return decoder


def read_config(folder: Path, *, max_len: int | None = None) -> DecoderConfig:
    """Translates `config.json`; ConfigError names the option that is not supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError("model", str(folder), "give a Hugging Face model folder (it has no config.json)")
    raw: dict[str, Any] = json.loads(path.read_text())
    architecture = (raw.get("architectures") or ["unknown"])[0]
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"{path}: architectures", architecture, f"only {' and '.join(ARCHITECTURES)} are supported")
    _refuse_options(path, raw)
    eos = raw.get("eos_token_id")
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not eos_ids:
        raise ConfigError(f"{path}: eos_token_id", eos, "name the token that ends a generation")
    own_limit = int(raw["max_position_embeddings"])
    heads = int(raw["num_attention_heads"])
    return DecoderConfig(
        vocab_size=int(raw["vocab_size"]),
        eos_token_id=eos_ids[0],
        extra_eos_token_ids=tuple(eos_ids[1:]),
        dim=int(raw["hidden_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or 0),
        ffn_dim=int(raw["intermediate_size"]),
        max_len=min(own_limit, max_len or own_limit),
        rope_theta=_rope_theta(raw),
        norm_eps=float(raw["rms_norm_eps"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM",
    )


def _refuse_options(path: Path, raw: dict[str, Any]) -> None:
    """ConfigError for every option whose effect the decoder does not reproduce."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    unsupported = {
        "rope_type": (rope_type, "default"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias", False)), False),
        "mlp_bias": (bool(raw.get("mlp_bias", False)), False),
        "use_sliding_window": (bool(raw.get("use_sliding_window", False)), False),
        "quantization_config": (raw.get("quantization_config"), None),
    }
    for field, (value, supported) in unsupported.items():
        if value != supported:
            raise ConfigError(f"{path}: {field}", value, f"only {supported!r} is supported")


def _rope_theta(raw: dict[str, Any]) -> float:
    """The rotary base, which moved inside `rope_parameters` in newer files."""
    return float((raw.get("rope_parameters") or {}).get("rope_theta") or raw.get("rope_theta") or 10_000.0)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of every `*.safetensors` file in the folder, by name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError("model", str(folder), "give a folder with *.safetensors files (pickled weights are not read)")
    from safetensors import safe_open  # an extra that built-in decoders do without

    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return tensors


@torch.no_grad()
def fill(decoder: Decoder, tensors: dict[str, Tensor], folder: Path) -> None:
    """Copies a checkpoint's tensors into the decoder's parameters.

    Raises:
        ConfigError: a tensor is missing, left over, or of another shape.
    """
    unused = set(tensors)
    for name, parameter in decoder.named_parameters():
        sources = checkpoint_names(name)
        missing = [source for source in sources if source not in tensors]
        if missing:
            raise ConfigError(f"{folder}: tensor", missing[0], "the checkpoint lacks it; is the folder complete?")
        value = torch.cat([tensors[source] for source in sources])
        if value.shape != parameter.shape:
            raise ConfigError(f"{folder}: {sources[0]}", tuple(value.shape), f"must be {tuple(parameter.shape)}")
        parameter.copy_(value)
        unused.difference_update(sources)
    # A tied head may be stored all the same, and old files carry rotary frequencies.
    unused -= {name for name in unused if name.endswith("rotary_emb.inv_freq")}
    if decoder.config.tied:
        unused.discard("lm_head.weight")
    if unused:
        raise ConfigError(f"{folder}: tensor", min(unused), "the decoder has no place for it")


_OUTER = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_INNER = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": ("mlp.down_proj",),
}


def checkpoint_names(parameter: str) -> list[str]:
    """The checkpoint's tensors whose concatenation (first axis) is the decoder's `parameter`."""
    if parameter == "head.weight":
        return ["lm_head.weight"]
    if parameter in _OUTER:
        return [_OUTER[parameter]]
    _, layer, *middle, kind = parameter.split(".")
    return [f"model.layers.{layer}.{name}.{kind}" for name in _INNER[".".join(middle)]]
