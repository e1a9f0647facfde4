"""A word-level tokenizer for tasks whose language has a small, closed vocabulary.

Owns the mapping of words to ids: three special tokens, then the words in the order given. A
conversation is `<bos> prompt <sep> action <eos>`, and `observation <sep>` before each further action.

Invariant: `decode(encode(text)) == text` for text whose words are separated by single spaces and
whose newlines stand alone; nothing outside the vocabulary is ever encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.errors import ConfigError
from rollout.rendering.types import strip_stop
from rollout.tasks.types import Task

SPECIAL_TOKENS = ("<bos>", "<eos>", "<sep>")
BOS, EOS, SEP = range(3)
NEWLINE = "\n"


class WordsRenderer:
    """`Renderer` over a list of words.

    Args:
        words: the vocabulary without special tokens; `"\\n"` is added when it is missing.

    Example: `WordsRenderer(["reverse", "x"]).prompt_ids("reverse x") == [0, 3, 4, 2]`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        ordered = list(words) if NEWLINE in words else [*words, NEWLINE]
        if len(set(ordered)) != len(ordered) or set(ordered) & set(SPECIAL_TOKENS):
            raise ConfigError("vocabulary", len(ordered), "words must be distinct and none a special token")
        self.tokens = (*SPECIAL_TOKENS, *ordered)
        self._ids = {token: index for index, token in enumerate(self.tokens)}

    @property
    def vocab_size(self) -> int:
        """Special tokens and words together."""
        return len(self.tokens)

    @property
    def eos_token_id(self) -> int:
        """The id that ends an action."""
        return EOS

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The end token alone."""
        return (EOS,)

    def encode(self, text: str) -> list[int]:
        """Ids of the words and newlines of `text`.

        Raises:
            ConfigError: a word is not in the vocabulary.
        """
        ids = []
        for word in text.replace(NEWLINE, f" {NEWLINE} ").split(" "):
            if not word:
                continue
            if word not in self._ids:
                raise ConfigError("text", word, f"is not one of the renderer's {self.vocab_size} words")
            ids.append(self._ids[word])
        return ids

    def prompt_ids(self, text: str) -> list[int]:
        """`<bos>`, the words, `<sep>`."""
        return [BOS, *self.encode(text), SEP]

    def prompt(self, task: Task) -> list[int]:
        """See `Renderer.prompt`."""
        return self.prompt_ids(task.prompt)

    def observation(self, text: str, *, closed: bool) -> list[int]:
        """See `Renderer.observation`; words outside the vocabulary are left out."""
        close = [] if closed else [EOS]
        words = text.replace(NEWLINE, f" {NEWLINE} ").split(" ")
        return [*close, *(self._ids[word] for word in words if word in self._ids), SEP]

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Renderer.decode`; special tokens inside are shown by name."""
        words = [self.tokens[index] for index in strip_stop(token_ids, self.stop_token_ids)]
        lines = " ".join(words).split(NEWLINE)
        return NEWLINE.join(line.strip(" ") for line in lines)

    def encode_action(self, text: str) -> list[int]:
        """See `Renderer.encode_action`."""
        return [*self.encode(text), EOS]

    def write_program(self, source: str) -> str:
        """The program itself."""
        return source
