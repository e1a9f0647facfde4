"""A setting that cannot work is refused when the file is read, by its name in the file, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.engine.config import EngineConfig
from rollout.errors import ConfigError
from rollout.train.config import TrainConfig, load_config, presets
from rollout.train.source import check_prompts, make_source

TOO_MANY = 10**12
TOO_LARGE_A_SEED = 2**63


def load(tmp_path: Path, dotted: str, value: str) -> TrainConfig:
    section, _, field = dotted.rpartition(".")
    room = "max_context_tokens = 160\n" if section == "engine" and field != "max_context_tokens" else ""
    (tmp_path / "run.toml").write_text(f"[{section}]\n{field} = {value}\n{room}")
    return load_config(str(tmp_path / "run.toml"))


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("learner.model.heads", "7", "must divide"),
        ("learner.model.heads", "32", "even"),
        ("learner.model.kv_heads", "2", "must divide heads"),
        ("learner.model.seed", f"{TOO_LARGE_A_SEED}", "must lie between"),
        ("learner.model.dim", f"{TOO_MANY}", "must lie between"),
        ("learner.threads", "1025", "must lie between"),
        ("learner.seed", f"{TOO_LARGE_A_SEED}", "must lie between"),
        ("learner.seed", "-1", "must lie between"),
        ("learner.publish_timeout_s", "0.0", "must lie in"),
        ("learner.publish_timeout_s", "nan", "must lie in"),
        ("learner.sft.batch_size", "30000", "demonstrations"),
        ("server.max_batch", "65537", "must lie between"),
        ("server.threads", "1025", "must lie between"),
        ("stop.reward", "nan", "must lie in"),
        ("stop.reward", "1.5", "must lie in"),
        ("stop.reward", "-0.1", "must lie in"),
        ("tasks.seed", f"{TOO_LARGE_A_SEED}", "must lie between"),
        ("tasks.seed", "-1", "must lie between"),
        ("tasks.num_heldout", f"{TOO_MANY}", "must lie between"),
        ("engine.seed", f"{TOO_LARGE_A_SEED}", "must lie between"),
        ("engine.max_staleness", "1025", "must lie between"),
        ("engine.max_dropped_in_a_row", "0", "must lie between"),
        ("engine.group_size", f"{TOO_MANY}", "must lie between"),
        ("engine.max_context_tokens", "161", r"learner\.model\.max_len = 160"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_name_in_the_file(
    tmp_path: Path, field: str, value: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        load(tmp_path, field, value)
    assert caught.value.field.endswith(f": {field}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learner.model.heads", "6"),
        ("learner.model.kv_heads", "1"),
        ("learner.seed", f"{TOO_LARGE_A_SEED - 1}"),
        ("stop.reward", "1.0"),
        ("engine.max_context_tokens", "160"),
        ("learner.model.max_len", "160"),
    ],
)
def test_a_value_at_its_bound_is_taken(tmp_path: Path, field: str, value: str) -> None:
    load(tmp_path, field, value)


def test_a_model_folder_brings_its_own_sizes(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[learner.model]\npath = "/models/x"\nheads = 7\n')
    assert load_config(str(tmp_path / "run.toml")).learner.model.heads == 7


def test_the_defaults_and_every_bundled_configuration_are_accepted() -> None:
    assert TrainConfig().engine.max_context_tokens <= TrainConfig().learner.model.max_len
    assert all(load_config(name) for name in presets())


def test_a_context_that_no_first_prompt_fits_into_is_refused_with_a_task_and_its_tokens() -> None:
    source, renderer = make_source(TrainConfig().tasks, None)
    first = renderer.prompt(next(source.train_tasks()))
    with pytest.raises(ConfigError, match=r"max_context_tokens = 2: the prompt of task demo/.* alone has \d+ tokens"):
        check_prompts(source, renderer, EngineConfig(max_context_tokens=2))
    only_the_first = EngineConfig(max_context_tokens=len(first), max_dropped_in_a_row=1)
    with pytest.raises(ConfigError, match=f"has {len(first)} tokens, and no first task has fewer"):
        check_prompts(source, renderer, only_the_first)


def test_a_context_that_some_prompts_fit_into_is_taken() -> None:
    source, renderer = make_source(TrainConfig().tasks, None)
    lengths = {len(renderer.prompt(task)) for task in source.heldout_tasks()}
    assert len(lengths) > 1
    check_prompts(source, renderer, EngineConfig(max_context_tokens=max(lengths)))
