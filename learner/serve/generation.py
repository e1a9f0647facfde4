"""One request on its way through the server: what was asked, and what has been sampled so far.

Invariant: `token_ids`, `logprobs` and the spans grow together; once `finish_reason` is set nothing
changes any more. The inference thread alone writes; others read after it has handed the object back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """A prompt with its sampling parameters (checked), and its continuation."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    """Already cut to the room that the context leaves."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Nats, of the distribution that was sampled from."""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(weight version, start, end) over `token_ids`, without gaps."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, or `error` (the model's logits were not finite)."""
    draws: np.random.Generator | None = None
    """One uniform number per sampled token; set at admission."""

    prefix_key: tuple[str, tuple[int, ...]] = field(init=False)
    """Equal for requests whose prompts may share keys and values."""

    def __post_init__(self) -> None:
        """Derives the prefix key once; it is as long as the prompt."""
        self.prefix_key = (self.cache_salt, tuple(self.prompt))

    def append(self, token: int, logprob: float, version: int) -> None:
        """Adds one sampled token."""
        at = len(self.token_ids)
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1], at + 1)
        else:
            self.spans.append((version, at, at + 1))
