"""Rollouts of SmolLM2 recorded elsewhere: our logprobs of their tokens agree.

They were sampled at temperature 0.8 by another engine in bfloat16, and their logprobs are raw (of temperature 1).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from learner.hf import load_decoder  # noqa: E402

SMOLLM2 = Path(__file__).resolve().parents[2] / "models" / "SmolLM2-135M-Instruct"


def test_logprobs_of_recorded_rollouts_agree_within_the_noise_of_bfloat16(data_dir: Path) -> None:
    if not SMOLLM2.is_dir():
        pytest.skip(f"no model at {SMOLLM2} (scripts/get-model makes it)")
    with gzip.open(data_dir / "smollm2-rollouts.jsonl.gz") as lines:
        rollouts = [rollout for rollout, _ in zip(map(json.loads, lines), range(40), strict=False)]
    rollouts = [rollout for rollout in rollouts if len(rollout["token_ids"]) < 150][:6]
    decoder = load_decoder(SMOLLM2, max_len=512)
    differences = {temperature: [] for temperature in (1.0, 0.8)}
    with torch.inference_mode():
        for rollout in rollouts:
            prompt, sampled = rollout["prompt_token_ids"], rollout["token_ids"]
            logits = decoder.logits(decoder(torch.tensor([prompt + sampled]))[0, len(prompt) - 1 : -1])
            for temperature, found in differences.items():
                logprobs = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
                found.append((logprobs - torch.tensor(rollout["logprobs"])).abs())
    means = {temperature: torch.cat(found).mean().item() for temperature, found in differences.items()}
    assert means[1.0] < 0.04
    assert means[0.8] > 2 * means[1.0]
