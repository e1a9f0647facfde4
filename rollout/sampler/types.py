"""The sampler's contract: one request for one action, in tokens both ways.

Invariant: an `Action` has passed every check of `validate_action`, so what lies above a sampler
never sees columns of unequal length, ids outside the vocabulary or logprobs that are not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollout.errors import SamplerFault
from rollout.tasks.types import Task
from rollout.types import VersionSpan

LOGPROB_SLACK = 1e-4
"""Rounding of a float32 log-softmax may put a certain token this far above 0; it is clamped."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. Scripted samplers and traces read it; it is never sent to a policy server."""

    task: Task
    sibling: int
    turn: int


class SampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one action."""

    token_ids: list[int]
    """The whole context, prompt first."""
    max_tokens: int
    """Most tokens of the action, at least 1; the stop token counts."""
    temperature: float
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    cache_salt: str | None = None
    """Separates prefix caches; the engine salts with the weight version at the group's start."""
    priority: int = 0
    """Lower is served earlier, where the server schedules by priority."""
    timeout_s: float = 300.0
    """For the whole request, retries included."""
    origin: Origin | None = None


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled in one turn; the stop token, where one ended it, is the last id."""

    token_ids: list[int]
    logprobs: list[float]
    """Nats, after temperature; one per token, finite, at most 0."""
    finish_reason: str
    """`stop` or `length`."""
    spans: tuple[VersionSpan, ...]
    """Weight versions; start and end index this action's tokens and cover them without a gap."""


class Sampler(Protocol):
    """Asks a policy for one action."""

    async def sample(self, request: SampleRequest) -> Action:
        """The action.

        Raises:
            SamplerFault: no valid action came in `request.timeout_s`.

        Cancellation abandons the request; the server is told by the closed connection.
        """
        ...


def validate_action(action: Action, *, max_tokens: int, vocab_size: int | None) -> Action:
    """The action itself, logprobs clamped to at most 0; the last line before training data.

    Raises:
        SamplerFault: it breaks the contract; the message says how.
    """
    num = len(action.token_ids)
    if action.finish_reason not in ("stop", "length"):
        raise SamplerFault(f"the policy server ended a request with finish_reason {action.finish_reason!r}")
    if not 1 <= num <= max_tokens:
        raise SamplerFault(f"the policy server returned {num} tokens; 1 to {max_tokens} were asked for")
    if len(action.logprobs) != num:
        raise SamplerFault(f"the policy server returned {num} token ids and {len(action.logprobs)} logprobs")
    if min(action.token_ids) < 0 or (vocab_size is not None and max(action.token_ids) >= vocab_size):
        raise SamplerFault(f"the policy server returned a token id outside [0, {vocab_size})")
    if not all(math.isfinite(logprob) and logprob <= LOGPROB_SLACK for logprob in action.logprobs):
        raise SamplerFault("the policy server returned a logprob that is not finite, or above 0")
    _check_spans(action.spans, num)
    if max(action.logprobs) <= 0.0:
        return action
    return msgspec.structs.replace(action, logprobs=[min(logprob, 0.0) for logprob in action.logprobs])


def _check_spans(spans: Sequence[VersionSpan], num_tokens: int) -> None:
    position = 0
    for span in spans:
        if span.start != position or span.end <= span.start:
            raise SamplerFault(f"weight version spans have a gap or an overlap at token {position}")
        position = span.end
    if position != num_tokens:
        raise SamplerFault(f"weight version spans cover {position} of {num_tokens} tokens")
