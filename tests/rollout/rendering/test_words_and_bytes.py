"""The built-in renderers: round trips, closed vocabularies, one close per turn."""

from __future__ import annotations

import pytest
from engine_fakes import make_task
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import ConfigError
from rollout.rendering.bytes import BytesRenderer
from rollout.rendering.words import BOS, EOS, SEP, WordsRenderer
from rollout.tasks.demo import DemoFamily


def test_every_demo_prompt_and_program_survives_a_round_trip() -> None:
    family = DemoFamily(0)
    renderer = WordsRenderer(family.vocabulary)
    for prompt, program in family.demonstrations(300):
        assert renderer.decode(renderer.encode_action(program)) == program
        ids = renderer.prompt_ids(prompt)
        assert (ids[0], ids[-1]) == (BOS, SEP)
        assert max(ids) < renderer.vocab_size


def test_a_word_outside_the_vocabulary_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'import'"):
        WordsRenderer(["x", "="]).encode("x = import")


def test_doubled_or_special_words_are_no_vocabulary() -> None:
    with pytest.raises(ConfigError):
        WordsRenderer(["x", "x"])
    with pytest.raises(ConfigError):
        WordsRenderer(["<eos>"])


def test_special_tokens_that_a_policy_writes_are_shown_and_do_not_crash() -> None:
    renderer = WordsRenderer(["x"])
    assert renderer.decode([3, BOS, SEP, EOS, 3, EOS]) == "x <bos> <sep> <eos> x"


def test_an_action_that_was_cut_gets_exactly_one_close() -> None:
    words, raw = WordsRenderer(["x"]), BytesRenderer()
    assert words.observation("x", closed=False) == [EOS, 3, SEP]
    assert words.observation("x unknown", closed=True) == [3, SEP]
    assert raw.observation("é", closed=False) == [257, 0xC3, 0xA9, 258]


@given(st.text())
def test_any_text_survives_bytes(text: str) -> None:
    renderer = BytesRenderer()
    text = text.encode("utf-8", "replace").decode()
    ids = renderer.encode_action(text)
    assert renderer.decode(ids) == text
    assert ids[-1:] == list(renderer.stop_token_ids)


def test_a_bytes_prompt_holds_the_task_text() -> None:
    task = make_task("é")
    assert bytes(BytesRenderer().prompt(task)[1:-1]).decode() == task.prompt


def test_lone_surrogates_do_not_stop_the_renderer() -> None:
    renderer = BytesRenderer()
    assert renderer.decode(renderer.encode_action("a\ud800b")) == "a?b"
    assert renderer.observation("\ud800", closed=True)
    assert renderer.prompt(make_task("\ud800"))
