"""The token record of one episode: append-only, one entry per token.

Invariant: a token once recorded never changes. `columns` asserts that what is handed out for
training is, token for token, what was sent to and sampled from the policy server.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout.sampler.types import Action
from rollout.types import VersionSpan


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The finished record: equal-length columns (see `Trajectory`) and version spans."""

    token_ids: list[int]
    loss_mask: list[bool]
    logprobs: list[float]
    spans: tuple[VersionSpan, ...]


class TokenRecord:
    """Grows by whole prompts, actions and observations.

    Args:
        prompt: the tokens of the first request; masked.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._token_ids = list(prompt)
        self._loss_mask = [False] * len(self._token_ids)
        self._logprobs = [0.0] * len(self._token_ids)
        self._spans: list[VersionSpan] = []
        self._pieces: list[tuple[int, ...]] = [tuple(self._token_ids)]

    def __len__(self) -> int:
        return len(self._token_ids)

    def context(self) -> list[int]:
        """A copy of everything so far: the next request's tokens."""
        return list(self._token_ids)

    def append_action(self, action: Action) -> None:
        """Adds sampled tokens: trained, with their logprobs and weight versions."""
        offset = len(self._token_ids)
        self._token_ids.extend(action.token_ids)
        self._loss_mask.extend([True] * len(action.token_ids))
        self._logprobs.extend(action.logprobs)
        for span in action.spans:
            self._add_span(VersionSpan(span.start + offset, span.end + offset, span.version))
        self._pieces.append(tuple(action.token_ids))

    def append_observation(self, token_ids: Sequence[int]) -> None:
        """Adds tokens that the policy did not write; masked."""
        self._token_ids.extend(token_ids)
        self._loss_mask.extend([False] * len(token_ids))
        self._logprobs.extend([0.0] * len(token_ids))
        self._pieces.append(tuple(token_ids))

    def columns(self) -> Columns:
        """The record, checked against the pieces it was made of."""
        position = 0
        for piece in self._pieces:
            assert self._token_ids[position : position + len(piece)] == list(piece), "a recorded prefix changed"
            position += len(piece)
        assert position == len(self._token_ids) == len(self._loss_mask) == len(self._logprobs)
        return Columns(
            token_ids=self.context(),
            loss_mask=list(self._loss_mask),
            logprobs=list(self._logprobs),
            spans=tuple(self._spans),
        )

    def _add_span(self, span: VersionSpan) -> None:
        last = self._spans[-1] if self._spans else None
        if last is not None and last.version == span.version and last.end == span.start:
            self._spans[-1] = VersionSpan(last.start, span.end, span.version)
        else:
            self._spans.append(span)
