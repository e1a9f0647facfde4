"""Sizes, durations and counts as people write them."""

from __future__ import annotations

import pytest

from sandbox.errors import ConfigError
from sandbox.quantities import format_size, parse_count, parse_duration, parse_number, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("64K", 65_536),
        ("64k", 65_536),
        ("512KiB", 524_288),
        ("64M", 67_108_864),
        ("64 MiB", 67_108_864),
        ("10MB", 10_000_000),
        ("1.5G", 1_610_612_736),
        ("1T", 1 << 40),
    ],
)
def test_a_size_is_understood_exactly(text: str, num_bytes: int) -> None:
    assert parse_size("--memory", text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "-1", "-64M", "64X", "1e9", "nan", "inf", "M", "1.0001B", "9" * 30, "1 2", "64MM"]
)
def test_a_bad_size_names_the_flag_the_value_and_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size("--memory", text)
    assert caught.value.field == "--memory"
    assert caught.value.value == text
    assert "must" in caught.value.remedy


def test_a_size_outside_its_range_is_refused_with_the_range() -> None:
    with pytest.raises(ConfigError, match=r"between 8 MiB and 16 TiB"):
        parse_size("--memory", "1K", low=8 << 20)
    with pytest.raises(ConfigError, match="between"):
        parse_size("--memory", "100T")


@pytest.mark.parametrize(
    ("text", "seconds"), [("5", 5.0), ("2.5s", 2.5), ("500ms", 0.5), ("10m", 600.0), ("1h", 3600.0)]
)
def test_a_duration_is_understood(text: str, seconds: float) -> None:
    assert parse_duration("--timeout", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "-5", "five", "nan", "1d", "25h", "1e3"])
def test_a_bad_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--timeout"):
        parse_duration("--timeout", text)


@pytest.mark.parametrize("text", ["", "0", "-3", "2.5", "many", "1" * 30])
def test_a_bad_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--pids"):
        parse_count("--pids", text, 2, 1 << 20)


def test_a_number_is_read_or_refused() -> None:
    assert parse_number("--cpus", "0.5", 0.01, 1024) == 0.5
    for text in ("nan", "-1", "0", "1e99", "two"):
        with pytest.raises(ConfigError, match="--cpus"):
            parse_number("--cpus", text, 0.01, 1024)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (65_536, "64 KiB"), (1_610_612_736, "1.5 GiB"), (1 << 44, "16 TiB")]
)
def test_a_size_is_shown_with_its_unit(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text
