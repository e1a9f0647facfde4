"""A byte-level tokenizer: any text without a model, for scripted policies and tests.

Ids 0 to 255 are UTF-8 bytes; 256 begins a conversation, 257 ends an action, 258 stands between
what the policy reads and what it writes.

Invariant: `decode(encode_action(text)) == text` for every well-formed text; lone surrogates become `?`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.rendering.types import strip_stop
from rollout.tasks.types import Task

BOS, EOS, SEP = 256, 257, 258


class BytesRenderer:
    """`Renderer` over UTF-8 bytes."""

    @property
    def vocab_size(self) -> int:
        """256 bytes and three special tokens."""
        return 259

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end token alone."""
        return (EOS,)

    def prompt(self, task: Task) -> list[int]:
        """See `Renderer.prompt`."""
        return [BOS, *task.prompt.encode("utf-8", "replace"), SEP]

    def observation(self, text: str, *, closed: bool) -> list[int]:
        """See `Renderer.observation`."""
        close = [] if closed else [EOS]
        return [*close, *text.encode("utf-8", "replace"), SEP]

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Renderer.decode`; bytes that are no UTF-8 become replacement characters."""
        ids = strip_stop(token_ids, self.stop_token_ids)
        return bytes(index for index in ids if index < 256).decode("utf-8", "replace")

    def encode_action(self, text: str) -> list[int]:
        """See `Renderer.encode_action`."""
        return [*text.encode("utf-8", "replace"), EOS]

    def write_program(self, source: str) -> str:
        """A fenced block, as chat models write."""
        return f"```python\n{source.rstrip()}\n```"
