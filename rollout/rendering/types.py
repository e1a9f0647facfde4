"""The renderer's contract: text of tasks and observations to tokens, and tokens of actions to text.

Invariant: a renderer only ever produces *new* tokens. What was sent or sampled before is never
rendered again, so the tokens that are trained are the tokens that were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollout.tasks.types import Task


class Renderer(Protocol):
    """Renders one policy's conversations."""

    @property
    def vocab_size(self) -> int:
        """Every token id is below it."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an action; the first is the one a scripted policy ends with."""
        ...

    def prompt(self, task: Task) -> list[int]:
        """Tokens of the first request: the task, up to where the policy begins to write."""
        ...

    def observation(self, text: str, *, closed: bool) -> list[int]:
        """Tokens between an action and the next one.

        Args:
            text: what the policy is shown.
            closed: the action ended with a stop token; otherwise the suffix begins with a close.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an action, without its stop token."""
        ...

    def encode_action(self, text: str) -> list[int]:
        """Tokens of an action that says `text`, stop token included (scripted policies)."""
        ...

    def write_program(self, source: str) -> str:
        """The text in which a policy of this renderer submits a program."""
        ...


def strip_stop(token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> Sequence[int]:
    """The ids without the stop token that ends them, if one does."""
    if token_ids and token_ids[-1] in stop_token_ids:
        return token_ids[:-1]
    return token_ids
