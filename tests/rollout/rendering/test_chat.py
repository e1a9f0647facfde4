"""Chat templates: equal to transformers' own rendering, recorded prompts to the token, prefixes kept."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import make_task

from rollout.errors import ConfigError
from rollout.rendering.chat import ChatRenderer
from rollout.tasks.types import Task

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}\n    "
    "{{- '<|im_start|>' + message.role + '\n\n' + message.content | trim + '<|im_end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{% endif %}"
)
MERGED_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% else %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>\n\n')[-1] if m.role == 'assistant' and not loop.last else m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_ACTIONS = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder that `scripts/get-model` makes."""
    default = Path(__file__).resolve().parents[3] / "models" / "SmolLM2-135M-Instruct"
    folder = Path(os.environ.get("ROLLOUT_TEST_MODEL", default))
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"no model at {folder} (run scripts/get-model, or set ROLLOUT_TEST_MODEL)")
    return folder


def make_folder(folder: Path, template: str, **settings: Any) -> Path:
    """A model folder with a byte-level tokenizer of 256 bytes and a few special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def ask(text: str) -> Task:
    return Task(id="ask/it", prompt=text)


@pytest.mark.parametrize("template", [CHATML, HEADERS, MERGED_SYSTEM], ids=["chatml", "headers", "merged system"])
@pytest.mark.parametrize("system", [None, "Answer in Python."])
def test_a_conversation_in_pieces_is_the_conversation_rendered_at_once(
    tmp_path: Path, template: str, system: str | None
) -> None:
    renderer = ChatRenderer(make_folder(tmp_path, template), system=system)
    ids = renderer.prompt(ask("Write f."))
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "Write f."})
    for answer, observed in (("def f(): é", "It failed:\n  1 != 2"), ("```python\nx\n```", "again")):
        ids = [*ids, *renderer.encode_action(answer), *renderer.observation(observed, closed=True)]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observed}]
    assert ids == renderer.encode(renderer.render(messages, generate=True))


@pytest.mark.parametrize("template", [CHATML, HEADERS, MERGED_SYSTEM], ids=["chatml", "headers", "merged system"])
def test_rendering_equals_transformers_own(tmp_path: Path, template: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    renderer = ChatRenderer(make_folder(tmp_path, template))
    messages = [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": "b"}]
    messages.append({"role": "user", "content": "c"})
    for generate in (False, True):
        (theirs,), _ = utils.render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=generate, bos_token="<s>", eos_token="</s>"
        )
        assert renderer.render(messages, generate=generate) == theirs


def test_a_cut_action_is_closed_once_by_the_template_own_close(tmp_path: Path) -> None:
    renderer = ChatRenderer(make_folder(tmp_path, CHATML))
    stop = renderer.stop_token_ids[0]
    cut, closed = renderer.observation("x", closed=False), renderer.observation("x", closed=True)
    assert cut == [stop, *closed]
    assert renderer.decode([*renderer.encode("y"), stop]) == "y"


def test_stop_tokens_are_the_template_close_then_the_generation_ends(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": [259]}')
    names = {"<|im_end|>": 257, "</s>": 259}
    assert ChatRenderer(folder).stop_token_ids == (names["<|im_end|>"], names["</s>"])


def test_a_template_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "", chat_template=None)
    (folder / "chat_template.jinja").write_text(CHATML)
    assert ChatRenderer(folder).vocab_size == 260


def test_ids_that_only_pad_the_embedding_can_be_sampled_and_decode_to_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, CHATML)
    (folder / "config.json").write_text('{"vocab_size": 512}')
    renderer = ChatRenderer(folder)
    assert renderer.vocab_size == 512
    assert renderer.decode([*renderer.encode("x"), 500, *renderer.encode("y")]) == "xy"


def test_a_template_that_rewrites_earlier_turns_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps earlier turns"):
        ChatRenderer(make_folder(tmp_path, STRIPS_THINKING))
    with pytest.raises(ConfigError, match="drops the assistant's messages"):
        ChatRenderer(make_folder(tmp_path, DROPS_ACTIONS))


def test_a_folder_without_tokenizer_or_template_is_refused_by_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ChatRenderer(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        ChatRenderer(make_folder(tmp_path, "", chat_template=None))
    with pytest.raises(ConfigError, match="chat_template"):
        ChatRenderer(make_folder(tmp_path, "{% for %}"))


def test_recorded_prompts_of_smollm2_come_out_token_for_token(smollm2: Path, data_dir: Path) -> None:
    renderer = ChatRenderer(smollm2)
    lines = gzip.decompress((data_dir / "smollm2-rollouts.jsonl.gz").read_bytes()).splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 400
    for row in rows:
        text = renderer._tokenizer.decode(row["prompt_token_ids"], skip_special_tokens=False)
        question = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        assert renderer.prompt(ask(question)) == row["prompt_token_ids"]
        assert renderer.decode(row["token_ids"]) == row["text"]
        if row["finish_reason"] == "stop":
            assert row["token_ids"][-1] == renderer.stop_token_ids[0]


def test_what_smollm2_is_sent_over_many_turns_is_its_own_template(smollm2: Path) -> None:
    renderer = ChatRenderer(smollm2)
    ids = renderer.prompt(make_task())
    messages = [{"role": "user", "content": make_task().prompt}]
    for turn in range(10):
        answer, observed = f"```python\nx = {turn}\n```", f"Traceback\n  line {turn}\nValueError: é"
        ids = [*ids, *renderer.encode_action(answer), *renderer.observation(observed, closed=True)]
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observed}]
    assert ids == renderer.encode(renderer.render(messages, generate=True))
