"""Chat models: a model folder's own tokenizer and chat template.

Owns the template and the tokenizer. Needs the extra `hf` (tokenizers, jinja2), imported when a
renderer is made. Invariants: only new suffixes are ever encoded; a template under which a longer
conversation does not begin with the shorter one, token for token, is refused at start-up.

Rendering follows transformers' `apply_chat_template`: jinja2 in a sandbox, `trim_blocks` and
`lstrip_blocks`, and `add_special_tokens=False` when the text is encoded.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from rollout.errors import ConfigError
from rollout.rendering.types import strip_stop
from rollout.tasks.types import Task

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

Message: TypeAlias = dict[str, str]
_MARK = "\u27eaaction\u27eb"
"""Stands for an action while the text behind it is looked up; occurs in no template."""
_PROBE = (
    {"role": "user", "content": "Write f.\n"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\ndef f():\n    return 1"},
    {"role": "user", "content": "  It failed:\n<b> 1 </b>"},
    {"role": "assistant", "content": "def f(): return 2"},
)


class ChatRenderer:
    """`Renderer` of a Hugging Face model folder.

    Args:
        model_dir: holds `tokenizer.json`, `tokenizer_config.json` and a chat template (in the
            latter or as `chat_template.jinja`).
        system: system prompt; None leaves it to the template's default.

    Raises:
        ConfigError: a file is missing, the extra is not installed, or the template breaks the
            prefix.
    """

    def __init__(self, model_dir: Path | str, *, system: str | None = None) -> None:
        folder = Path(model_dir)
        self._tokenizer = _load_tokenizer(folder)
        settings = _read_settings(folder)
        self._special = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self._template = _compile(_template_source(folder, settings), folder)
        self._system = system
        self._vocab_size = max(self._tokenizer.get_vocab_size(with_added_tokens=True), _model_vocab_size(folder))
        self._stop_token_ids = self._find_stops(folder)
        self.check_prefix(folder)

    @property
    def vocab_size(self) -> int:
        """Added tokens included, and the ids that only pad the model's embedding: it can sample them."""
        return self._vocab_size

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What ends an assistant's message in the template first, then the generation config's ends."""
        return self._stop_token_ids

    def prompt(self, task: Task) -> list[int]:
        """See `Renderer.prompt`: the task is the user's first message."""
        messages = [{"role": "system", "content": self._system}] if self._system is not None else []
        return self.encode(self.render([*messages, {"role": "user", "content": task.prompt}], generate=True))

    def observation(self, text: str, *, closed: bool) -> list[int]:
        """See `Renderer.observation`: the text is a user's message."""
        suffix = self._after_action({"role": "user", "content": text})
        ids = self.encode(suffix)
        if closed and ids and ids[0] in self._stop_token_ids:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Renderer.decode`; special tokens are left out."""
        text: str = self._tokenizer.decode(list(strip_stop(token_ids, self._stop_token_ids)), skip_special_tokens=True)
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which special tokens are written out."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_action(self, text: str) -> list[int]:
        """See `Renderer.encode_action`."""
        return [*self.encode(text), self._stop_token_ids[0]]

    def write_program(self, source: str) -> str:
        """A fenced block."""
        return f"```python\n{source.rstrip()}\n```"

    def render(self, messages: Sequence[Message], *, generate: bool) -> str:
        """The conversation's text.

        Args:
            messages: `role` and `content` each.
            generate: end with what introduces the assistant's next message.
        """
        return self._template.render(
            messages=list(messages), add_generation_prompt=generate, tools=None, **self._special
        )

    def check_prefix(self, folder: Path) -> None:
        """Whether piecewise rendering yields exactly the tokens of rendering the whole conversation.

        Raises:
            ConfigError: it does not.
        """
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        whole = self.encode(self.render([*system, *_PROBE], generate=False))
        pieces = self.encode(self.render([*system, _PROBE[0]], generate=True))
        pieces += self.encode_action(_PROBE[1]["content"])
        pieces += self.observation(_PROBE[2]["content"], closed=True)
        pieces += self.encode_action(_PROBE[3]["content"])
        if whole[: len(pieces)] != pieces:
            at = next(i for i, (a, b) in enumerate(zip([*whole, -1], [*pieces, -2], strict=False)) if a != b)
            raise ConfigError(
                "chat_template",
                str(folder),
                f"a longer conversation does not begin with the shorter one (they part at token {at}: "
                f"{self._tokenizer.decode(whole[max(0, at - 5) : at + 5], skip_special_tokens=False)!r}); "
                "use a template that keeps earlier turns as they were written",
            )

    def _after_action(self, observation: Message) -> str:
        """Text from the end of an assistant's message to where the next one begins."""
        system = [{"role": "system", "content": self._system}] if self._system is not None else []
        first = {"role": "user", "content": "?"}
        action = {"role": "assistant", "content": _MARK}
        text = self.render([*system, first, action, observation], generate=True)
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise ConfigError("chat_template", before[:40], "it drops the assistant's messages")
        return after

    def _find_stops(self, folder: Path) -> tuple[int, ...]:
        """The token that closes an assistant's message, and the ends that generation knows."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
        after = self.encode(self.render(messages, generate=False).partition(_MARK)[2])
        special = {index for index, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        if not after or after[0] not in special:
            _refuse(folder, "the assistant's message is not closed by a special token")
        stops = dict.fromkeys([after[0], *_generation_stops(folder)])
        eos = self._special["eos_token"]
        eos_id = self._tokenizer.token_to_id(eos) if eos else None
        if eos_id is not None:
            stops[eos_id] = None
        return tuple(stops)


def _load_tokenizer(folder: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError("renderer", "chat", "install the extra: pip install 'rollout-engine[hf]'") from error
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError("model_dir", str(folder), "holds no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    try:
        settings: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("model_dir", str(folder), f"tokenizer_config.json: {error}") from error
    return settings


def _template_source(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = next((item["template"] for item in source if item.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError("model_dir", str(folder), "holds no chat template")
    return source


def _compile(source: str, folder: Path) -> Template:
    try:
        from jinja2 import TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError("renderer", "chat", "install the extra: pip install 'rollout-engine[hf]'") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError("chat_template", str(folder), str(error)) from error


def _model_vocab_size(folder: Path) -> int:
    """Of the model's embedding; 0 where the folder does not say."""
    return int(_optional_json(folder / "config.json").get("vocab_size", 0))


def _optional_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError("model_dir", str(path), str(error)) from error
    return values


def _generation_stops(folder: Path) -> list[int]:
    stops = _optional_json(folder / "generation_config.json").get("eos_token_id")
    if stops is None:
        return []
    return list(stops) if isinstance(stops, list) else [int(stops)]


def _token_text(value: Any) -> str | None:
    """Tokenizer configs hold a token as its text or as an object with `content`."""
    return value.get("content") if isinstance(value, dict) else value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise ConfigError("chat_template", message, "the template refuses this conversation")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _refuse(folder: Path, why: str) -> NoReturn:
    raise ConfigError("chat_template", str(folder), why)
