"""A config file is wholly accepted, or refused with field, value and remedy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rollout.config.load import load_toml
from rollout.errors import ConfigError
from sandbox.types import Limits


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    group_size: int = 8
    limits: Limits = Limits()


class Whole(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "x"
    part: Part = Part()


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_a_complete_file_becomes_the_struct(tmp_path: Path) -> None:
    loaded = load_toml(write(tmp_path, 'name = "a"\n[part]\ngroup_size = 4\n[part.limits]\npids = 9\n'), Whole)
    assert loaded == Whole(name="a", part=Part(group_size=4, limits=Limits(pids=9)))


def test_an_unknown_field_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"part\.groupsize = 4: unknown field; did you mean `group_size`\?"):
        load_toml(write(tmp_path, "[part]\ngroupsize = 4\n"), Whole)


def test_an_unknown_field_without_a_near_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known: name, part"):
        load_toml(write(tmp_path, "zzz = 4\n"), Whole)


def test_a_wrong_type_names_the_field_and_the_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"part\.group_size = 'four'"):
        load_toml(write(tmp_path, '[part]\ngroup_size = "four"\n'), Whole)


def test_a_range_error_of_a_nested_struct_keeps_its_field_value_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"limits\.pids = -1: must lie between"):
        load_toml(write(tmp_path, "[part.limits]\npids = -1\n"), Whole)


@pytest.mark.parametrize("text", ["name = ", "[part", "\0"])
def test_what_is_no_toml_is_refused_with_the_place(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_toml(write(tmp_path, text), Whole)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_toml(tmp_path / "none.toml", Whole)
