"""Where a run's tasks, demonstrations and renderer come from.

Invariant: everything is a function of the run's config, so that a resumed run continues with
exactly the tasks and demonstrations that the first one would have seen.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from rollout.config.bounds import MAX_COUNT, MAX_SEED
from rollout.engine.config import EngineConfig
from rollout.errors import ConfigError
from rollout.lane.packing import SftExample
from rollout.rendering.types import Renderer
from rollout.rendering.words import WordsRenderer
from rollout.tasks.demo import DemoFamily
from rollout.tasks.load import load_tasks
from rollout.tasks.types import Task

DEMO = "demo"
NUM_DEMONSTRATIONS = 25_600
"""Demonstrations of the demo family that the SFT steps draw from."""


class TasksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained on and what is held out."""

    train: str = DEMO
    """`demo`, or any task set that `rollout eval` takes (`humaneval:PATH`, `PATH.jsonl`, …)."""
    heldout: str = DEMO
    """The set that evaluations use; of a set that names both splits, only its held-out tasks."""
    num_heldout: int = 300
    """Held-out tasks of one evaluation."""
    heldout_samples: int = 2
    """Samples of each."""
    seed: int = 1

    def __post_init__(self) -> None:
        for field in ("num_heldout", "heldout_samples"):
            if not 1 <= getattr(self, field) <= MAX_COUNT:
                raise ConfigError(f"tasks.{field}", getattr(self, field), f"must lie between 1 and {MAX_COUNT}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError("tasks.seed", self.seed, f"must lie between 0 and {MAX_SEED}")
        if (self.train == DEMO) != (self.heldout == DEMO):
            raise ConfigError("tasks.heldout", self.heldout, "the demo family goes with itself: set both to `demo`")


class TaskSource(Protocol):
    """Tasks and demonstrations of one run."""

    def train_tasks(self) -> Iterator[Task]:
        """Training tasks in their order, without end."""
        ...

    def heldout_tasks(self) -> Sequence[Task]:
        """The tasks of every evaluation."""
        ...

    def sft_batch(self, step: int, batch_size: int) -> list[SftExample]:
        """The demonstrations of one SFT step."""
        ...


class DemoSource:
    """The generated demo family with the words renderer."""

    def __init__(self, config: TasksConfig) -> None:
        self._config = config
        self._family = DemoFamily(config.seed)
        self.renderer = WordsRenderer(self._family.vocabulary)
        self._demonstrations: list[tuple[str, str]] | None = None

    def train_tasks(self) -> Iterator[Task]:
        """Distinct compositions; from the start again if the family should run out."""
        return itertools.chain.from_iterable(self._family.iter_tasks("train") for _ in itertools.count())

    def heldout_tasks(self) -> Sequence[Task]:
        """The first `num_heldout` held-out compositions."""
        return self._family.tasks("heldout", self._config.num_heldout)

    def sft_batch(self, step: int, batch_size: int) -> list[SftExample]:
        """`batch_size` recorded demonstrations, imperfect ones among them, drawn by step."""
        if self._demonstrations is None:
            self._demonstrations = self._family.demonstrations(NUM_DEMONSTRATIONS)
        rng = random.Random(f"sft {self._config.seed} {step}")
        chosen = rng.sample(self._demonstrations, batch_size)
        return [
            _example(self.renderer.prompt_ids(prompt), self.renderer.encode_action(program))
            for prompt, program in chosen
        ]


class ListSource:
    """A loaded task set; its oracles serve as demonstrations."""

    def __init__(self, config: TasksConfig, renderer: Renderer) -> None:
        self._config = config
        self._renderer = renderer
        train = load_tasks(config.train)
        heldout = train if config.heldout == config.train else load_tasks(config.heldout)
        self._train = [task for task in train if task.split != "heldout"]
        self._heldout = [task for task in heldout if task.split == "heldout"] or list(heldout)
        if not self._train:
            raise ConfigError("tasks.train", config.train, "holds no task whose split is `train`")

    def train_tasks(self) -> Iterator[Task]:
        """The set in a new seeded order each time round."""
        for epoch in itertools.count():
            order = list(self._train)
            random.Random(f"train {self._config.seed} {epoch}").shuffle(order)
            yield from order

    def heldout_tasks(self) -> Sequence[Task]:
        """The first `num_heldout` tasks of the held-out set."""
        return self._heldout[: self._config.num_heldout]

    def sft_batch(self, step: int, batch_size: int) -> list[SftExample]:
        """Oracles of training tasks, drawn by step.

        Raises:
            ConfigError: no training task has an oracle.
        """
        solved = [task for task in self._train if task.oracle is not None]
        if not solved:
            raise ConfigError("learner.sft.steps", step, "no training task has an oracle to imitate; set steps = 0")
        rng = random.Random(f"sft {self._config.seed} {step}")
        return [
            _example(
                self._renderer.prompt(task),
                self._renderer.encode_action(self._renderer.write_program(task.oracle or "")),
            )
            for task in rng.choices(solved, k=batch_size)
        ]


def check_prompts(source: TaskSource, renderer: Renderer, engine: EngineConfig) -> None:
    """Refuses a context that none of the first tasks fits into; single long tasks are the engine's to drop.

    Raises:
        ConfigError: names the task with the shortest prompt, and its tokens.
    """
    first_tasks = itertools.islice(source.train_tasks(), engine.max_dropped_in_a_row)
    for tasks in (source.heldout_tasks(), first_tasks):
        num_tokens, task_id = min(((len(renderer.prompt(task)), task.id) for task in tasks), default=(0, ""))
        if num_tokens >= engine.max_context_tokens:
            remedy = f"the prompt of task {task_id} alone has {num_tokens} tokens, and no first task has fewer"
            raise ConfigError("engine.max_context_tokens", engine.max_context_tokens, remedy)


def _example(prompt: list[int], action: list[int]) -> SftExample:
    return SftExample(
        token_ids=[*prompt, *action],
        loss_mask=[False] * len(prompt) + [True] * len(action),
    )


def make_source(config: TasksConfig, model_dir: Path | None) -> tuple[TaskSource, Renderer]:
    """The source and the renderer that belongs to the policy.

    Args:
        model_dir: a Hugging Face model folder, whose chat template then renders; None for the
            built-in decoder over the demo family's words.
    """
    if config.train == DEMO:
        if model_dir is not None:
            raise ConfigError("learner.model.path", str(model_dir), "the demo family is for the built-in decoder")
        source = DemoSource(config)
        return source, source.renderer
    if model_dir is None:
        raise ConfigError("learner.model.path", None, "name a model folder; the built-in decoder knows only the demo")
    from rollout.rendering.chat import ChatRenderer

    renderer = ChatRenderer(model_dir)
    return ListSource(config, renderer), renderer
