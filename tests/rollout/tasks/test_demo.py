"""The generated demo family: what it promises to those who train on it."""

from __future__ import annotations

import itertools
import keyword

import pytest

from rollout.tasks.demo import DemoFamily, join_words, split_words
from rollout.tasks.demo.family import MAX_PROGRAM_WORDS, MAX_PROMPT_WORDS, NUM_HELDOUT, NUM_HIDDEN_INPUTS
from rollout.tasks.literals import parsed
from rollout.tasks.program import program_of
from rollout.tasks.types import CaseTests, Task


@pytest.fixture(scope="module")
def family() -> DemoFamily:
    return DemoFamily(7)


@pytest.fixture(scope="module")
def sample(family: DemoFamily) -> list[Task]:
    return family.tasks("train", 150) + family.tasks("heldout", 150)


def passes(task: Task, program: str) -> bool:
    """The family's own text, run here: trusted."""
    namespace: dict[str, object] = {}
    exec(program_of(task, program), namespace)
    tests = task.hidden_tests
    assert isinstance(tests, CaseTests)
    return all(namespace["solve"](*arguments) == expected for arguments, expected in parsed(tests))  # type: ignore[operator]


def test_there_are_59_operations_with_at_least_one_bug_each(family: DemoFamily) -> None:
    assert len(family.operations) == 59
    assert len({op.words for op in family.operations}) == 59
    assert all(op.bugs and op.line not in op.bugs for op in family.operations)


def test_the_vocabulary_is_small_and_covers_every_text_word_by_word(family: DemoFamily, sample: list[Task]) -> None:
    vocabulary = family.vocabulary
    assert 50 <= len(vocabulary) <= 100
    assert len(set(vocabulary)) == len(vocabulary)
    texts = [text for task in sample for text in (task.prompt, task.oracle or "", *task.known_wrong)]
    texts += [text for pair in family.demonstrations(2000) for text in pair]
    for text in texts:
        assert set(split_words(text)) <= set(vocabulary)
        assert join_words(split_words(text)) == text


def test_prompts_and_programs_keep_their_bounds(family: DemoFamily) -> None:
    pairs = family.demonstrations(5000)
    assert max(len(split_words(prompt)) for prompt, _ in pairs) <= MAX_PROMPT_WORDS
    assert max(len(split_words(program)) for _, program in pairs) <= MAX_PROGRAM_WORDS


def test_every_right_program_passes_and_every_planted_bug_or_missing_line_is_caught(
    family: DemoFamily, sample: list[Task]
) -> None:
    by_words = {op.words: op for op in family.operations}
    for task in sample:
        chosen = [by_words[words] for words in task.prompt.split(" then ")]
        assert isinstance(task.hidden_tests, CaseTests)
        assert len(task.hidden_tests.cases) == NUM_HIDDEN_INPUTS
        programs = itertools.product(*[(op.line, *op.bugs, "") for op in chosen])
        assert passes(task, "\n".join(next(programs)))
        for lines in programs:
            program = "\n".join(line for line in lines if line)
            assert not passes(task, program), (task.prompt, program)


def test_heldout_compositions_never_occur_in_train_draws(family: DemoFamily) -> None:
    heldout = {task.prompt for task in family.tasks("heldout", 10_000)}
    assert len(heldout) == NUM_HELDOUT
    assert all(2 <= prompt.count(" then ") + 1 <= 3 for prompt in heldout)
    assert not heldout & {task.prompt for task in family.tasks("train", 1500)}
    assert not heldout & {prompt for prompt, _ in family.demonstrations(30_000)}


def test_visible_and_hidden_inputs_differ(sample: list[Task]) -> None:
    for task in sample:
        assert isinstance(task.visible_tests, CaseTests)
        assert isinstance(task.hidden_tests, CaseTests)
        assert task.visible_tests.cases
        assert not set(task.visible_tests.cases) & set(task.hidden_tests.cases)


def test_everything_follows_from_the_seed_and_draws_are_prefixes_of_each_other(family: DemoFamily) -> None:
    again, other = DemoFamily(7), DemoFamily(8)
    assert again.tasks("train", 20) == family.tasks("train", 40)[:20]
    assert again.tasks("heldout", 5) == family.tasks("heldout", 300)[:5]
    assert again.demonstrations(50) == family.demonstrations(100)[:50]
    assert other.tasks("train", 20) != family.tasks("train", 20)
    assert other.heldout != family.heldout


def test_train_tasks_are_distinct_and_of_every_length(family: DemoFamily) -> None:
    tasks = family.tasks("train", 400)
    assert len({task.id for task in tasks}) == 400
    assert {task.difficulty for task in tasks} == {"1", "2", "3"}
    assert {task.split for task in tasks} == {"train"}


def test_about_a_third_of_the_demonstrated_lines_is_buggy(family: DemoFamily) -> None:
    right = {op.words: op.line for op in family.operations}

    def buggy(pairs: list[tuple[str, str]]) -> list[bool]:
        return [
            right[words] != line
            for prompt, program in pairs
            for words, line in zip(prompt.split(" then "), program.split("\n"), strict=True)
        ]

    lines = buggy(family.demonstrations(5000))
    assert 0.33 < sum(lines) / len(lines) < 0.37
    assert not any(buggy(DemoFamily(7, bug_probability=0.0).demonstrations(200)))


def test_no_word_of_a_prompt_is_a_python_keyword_that_programs_need(family: DemoFamily) -> None:
    words = {word for op in family.operations for word in split_words(op.words)}
    assert not any(keyword.iskeyword(word) for word in words)


def test_wrong_arguments_are_refused(family: DemoFamily) -> None:
    with pytest.raises(ValueError, match="split"):
        family.tasks("test", 1)
    with pytest.raises(ValueError, match="bug_probability"):
        DemoFamily(0, bug_probability=2.0)
