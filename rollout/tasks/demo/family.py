"""A generated family of tasks that a tiny policy can learn: pipelines of one to three operations.

"above 4 then reverse then times 3" asks for three lines of Python, each of which reassigns `x`.
Recorded demonstrations are imperfect on purpose (each line is buggy with p = 0.35), so that
supervised training alone ends well below 1 and reinforcement learning has something to improve.

Invariants: everything is a function of the seed; a held-out composition never occurs in a train
task or a demonstration; a task's hidden inputs tell its solution from every program that has
any planted bug, or any omitted line, anywhere.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from rollout.tasks.demo.operations import Operation, Values, compile_line, operations
from rollout.tasks.types import Case, CaseTests, Task, TaskLimits

Composition: TypeAlias = tuple[int, ...]
"""Indices into `operations()`, first applied first."""

NUM_HELDOUT = 300
NUM_HIDDEN_INPUTS = 7
NUM_VISIBLE_INPUTS = 2
BUG_PROBABILITY = 0.35
MAX_PROMPT_WORDS = 8
"""Three operations of two words and two `then`."""
MAX_PROGRAM_WORDS = 47
"""Three lines of at most 15 words and two newlines."""
WRAPPER = "def solve(x):\n    {submission}\n    return x\n"

_LENGTHS = (1, 2, 3)
_TRAIN_WEIGHTS = (0.2, 0.4, 0.4)
_HELDOUT_WEIGHTS = (0.0, 0.5, 0.5)
_NUM_POOL_INPUTS = 24
_MAX_KNOWN_WRONG = 6
_NO_LINE = ""


class DemoFamily:
    """Tasks, demonstrations and vocabulary of one seed.

    Draws are deterministic and prefix-stable: `tasks(split, 10) == tasks(split, 20)[:10]`.

    Args:
        seed: decides the held-out compositions, every draw and every input.
        bug_probability: chance that one line of a demonstration is buggy.
    """

    def __init__(self, seed: int = 0, *, bug_probability: float = BUG_PROBABILITY) -> None:
        if not 0.0 <= bug_probability <= 1.0:
            raise ValueError(f"bug_probability must lie in [0, 1], not {bug_probability}")
        self.seed = seed
        self.operations = operations()
        self._bug_probability = bug_probability
        lines = {line for op in self.operations for line in (op.line, *op.bugs)}
        self._functions = {line: compile_line(line) for line in sorted(lines)}
        self._heldout = self._draw_heldout()

    @property
    def vocabulary(self) -> list[str]:
        """Every word of any prompt or program, the newline included, in a fixed order."""
        words = {"then", "\n"}
        for op in self.operations:
            for text in (op.words, op.line, *op.bugs):
                words.update(split_words(text))
        return sorted(words)

    @property
    def heldout(self) -> frozenset[Composition]:
        """The compositions that only held-out tasks are made of."""
        return frozenset(self._heldout)

    def tasks(self, split: str, n: int) -> list[Task]:
        """The first `n` distinct tasks of `train` or `heldout` (at most 300 are held out)."""
        return list(itertools.islice(self.iter_tasks(split), n))

    def iter_tasks(self, split: str) -> Iterator[Task]:
        """Distinct tasks of `split`; `train` goes on until the family (about 10^5 tasks) is exhausted."""
        if split == "heldout":
            for composition, cases in self._heldout.items():
                yield self._task(composition, cases, split)
        elif split == "train":
            for composition, cases in self._distinct(random.Random(f"train {self.seed}"), _TRAIN_WEIGHTS):
                if composition not in self._heldout:
                    yield self._task(composition, cases, split)
        else:
            raise ValueError(f"split must be 'train' or 'heldout', not {split!r}")

    def demonstrations(self, n: int) -> list[tuple[str, str]]:
        """`n` pairs of prompt and program for supervised training, imperfect as the module says."""
        rng = random.Random(f"demonstrations {self.seed}")
        return [self._demonstration(rng) for _ in range(n)]

    def _demonstration(self, rng: random.Random) -> tuple[str, str]:
        composition = self._draw(rng, _TRAIN_WEIGHTS)
        while composition in self._heldout:
            composition = self._draw(rng, _TRAIN_WEIGHTS)
        chosen = [self.operations[index] for index in composition]
        lines = [rng.choice(op.bugs) if rng.random() < self._bug_probability else op.line for op in chosen]
        return prompt_of(chosen), "\n".join(lines)

    def _draw_heldout(self) -> dict[Composition, list[Values]]:
        draws = self._distinct(random.Random(f"heldout {self.seed}"), _HELDOUT_WEIGHTS)
        return dict(itertools.islice(draws, NUM_HELDOUT))

    def _draw(self, rng: random.Random, weights: Sequence[float]) -> Composition:
        (length,) = rng.choices(_LENGTHS, weights)
        return tuple(rng.randrange(len(self.operations)) for _ in range(length))

    def _distinct(
        self, rng: random.Random, weights: Sequence[float], max_misses: int = 100_000
    ) -> Iterator[tuple[Composition, list[Values]]]:
        """Compositions in drawn order, each once, with inputs that kill every planted bug."""
        seen: set[Composition] = set()
        misses = 0
        while misses < max_misses:
            composition = self._draw(rng, weights)
            if composition in seen:
                misses += 1
                continue
            misses = 0
            seen.add(composition)
            inputs = self._killing_inputs(composition)
            if inputs is not None:
                yield composition, inputs

    def _killing_inputs(self, composition: Composition) -> list[Values] | None:
        """Visible inputs, then hidden ones that together kill every wrong variant; None if none do."""
        rng = random.Random(f"inputs {self.seed} {composition}")
        pool = [_random_values(rng) for _ in range(_NUM_POOL_INPUTS)]
        right = self._results([self.operations[index].line for index in composition], pool)
        alive = [
            {i for i, result in enumerate(self._results(lines, pool)) if result != right[i]}
            for lines in self._wrong_programs(composition)
        ]
        chosen: list[int] = []
        while alive:
            best = max(range(len(pool)), key=lambda i: sum(i in killers for killers in alive))
            remaining = [killers for killers in alive if best not in killers]
            if len(remaining) == len(alive) or len(chosen) == NUM_HIDDEN_INPUTS:
                return None
            chosen.append(best)
            alive = remaining
        rest = [i for i in range(len(pool)) if i not in chosen]
        hidden = chosen + rest[: NUM_HIDDEN_INPUTS - len(chosen)]
        visible = [i for i in rest if i not in hidden][:NUM_VISIBLE_INPUTS]
        return [pool[i] for i in visible + hidden]

    def _wrong_programs(self, composition: Composition) -> Iterator[list[str]]:
        """Every program with at least one buggy or omitted line."""
        choices = [(op.line, *op.bugs, _NO_LINE) for op in (self.operations[index] for index in composition)]
        programs = itertools.product(*choices)
        next(programs)
        for program in programs:
            yield list(program)

    def _results(self, lines: Sequence[str], inputs: Sequence[Values]) -> list[Values]:
        functions = [self._functions[line] for line in lines if line != _NO_LINE]
        results = []
        for values in inputs:
            for function in functions:
                values = function(values)
            results.append(values)
        return results

    def _task(self, composition: Composition, inputs: list[Values], split: str) -> Task:
        chosen = [self.operations[index] for index in composition]
        lines = [op.line for op in chosen]
        cases = tuple(
            Case(args=repr([values]), expected=repr(result))
            for values, result in zip(inputs, self._results(lines, inputs), strict=True)
        )
        wrong = itertools.islice(self._single_bugs(chosen), _MAX_KNOWN_WRONG)
        return Task(
            id="demo/" + ".".join(op.words.replace(" ", "-") for op in chosen),
            prompt=prompt_of(chosen),
            entry_points=("solve",),
            visible_tests=CaseTests(cases=cases[:NUM_VISIBLE_INPUTS]),
            hidden_tests=CaseTests(cases=cases[NUM_VISIBLE_INPUTS:]),
            wrapper=WRAPPER,
            oracle="\n".join(lines),
            known_wrong=("", *wrong),
            limits=TaskLimits(verify_timeout_s=4.0, memory_bytes=128 * 1024 * 1024),
            difficulty=str(len(chosen)),
            split=split,
            metadata={"family": "demo", "seed": str(self.seed)},
        )

    @staticmethod
    def _single_bugs(chosen: Sequence[Operation]) -> Iterator[str]:
        for place, op in enumerate(chosen):
            for bug in op.bugs:
                yield "\n".join(bug if i == place else other.line for i, other in enumerate(chosen))


def prompt_of(chosen: Sequence[Operation]) -> str:
    """The pipeline in words: `above 4 then reverse`."""
    return " then ".join(op.words for op in chosen)


def split_words(text: str) -> list[str]:
    """The words of a prompt or program, each newline a word of its own."""
    return re.findall(r"\n|[^ \n]+", text)


def join_words(words: Sequence[str]) -> str:
    """Inverse of `split_words` on this family's texts: words joined by spaces, none around a newline."""
    return re.sub(r" ?\n ?", "\n", " ".join(words))


def _random_values(rng: random.Random) -> Values:
    return [rng.randint(-3, 12) for _ in range(rng.randint(6, 11))]
