"""Hugging Face folders: equal to transformers where supported, refused by name where not."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from learner.hf import load_decoder  # noqa: E402
from rollout.errors import ConfigError  # noqa: E402

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 3,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
SMOLLM2 = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"


def save_model(folder: Path, kind: str, **options: Any) -> Any:
    """Writes a tiny random model of a Hugging Face class; returns that class's own instance."""
    config_type = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind]
    model_type = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}[kind]
    torch.manual_seed(0)
    model = model_type(config_type(**SIZES, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2 if name.endswith("bias") else 0.08)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": True, "head_dim": 32, "rope_theta": 100_000.0}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False}),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    reference = save_model(tmp_path, kind, **options)
    decoder = load_decoder(tmp_path)
    token_ids = torch.randint(0, SIZES["vocab_size"], (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(token_ids).logits
        actual = decoder.logits(decoder(token_ids))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["MistralForCausalLM"]),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10_000.0}),
        ("attention_bias", True),
    ],
)
def test_what_the_decoder_cannot_reproduce_is_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    save_model(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_decoder(tmp_path)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_decoder(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, "llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"model\.layers\.2\."):
        load_decoder(tmp_path)


def test_smollm2_equals_transformers_in_float32() -> None:
    if not SMOLLM2.is_dir():
        pytest.skip(f"no model at {SMOLLM2} (scripts/get-model makes it)")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    decoder = load_decoder(SMOLLM2, max_len=256)
    token_ids = torch.randint(0, 49_152, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(token_ids).logits.log_softmax(-1)
        actual = decoder.logits(decoder(token_ids)).log_softmax(-1)
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=1e-3)
