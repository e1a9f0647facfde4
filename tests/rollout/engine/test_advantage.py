"""Exact values of every estimator, masked and degenerate groups included."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.advantage import Estimator, advantages

ALL = [True] * 4


@pytest.mark.parametrize(("estimator", "expected"), [("grpo", 0.866024), ("grpo_no_std", 0.5), ("rloo", 0.666667)])
def test_a_mixed_group_has_the_published_values(estimator: Estimator, expected: float) -> None:
    values = advantages([1, 0, 0, 1], ALL, estimator)
    np.testing.assert_allclose(values, [expected, -expected, -expected, expected], atol=5e-7)


def test_a_masked_sample_is_no_part_of_the_mean_and_gets_zero() -> None:
    values = advantages([1, 1, 0, 0], [True, False, True, True], "grpo_no_std")
    np.testing.assert_allclose(values, [2 / 3, 0, -1 / 3, -1 / 3], rtol=1e-6)


def test_a_masked_not_a_number_does_not_leak() -> None:
    values = advantages([1, float("nan"), 0], [True, False, True], "rloo")
    np.testing.assert_allclose(values, [1, 0, -1])


@pytest.mark.parametrize("estimator", ["grpo", "grpo_no_std", "rloo"])
@pytest.mark.parametrize(
    ("rewards", "valid"),
    [([1.0], [True]), ([1, 0], [True, False]), ([1, 0], [False, False]), ([0.1] * 5, [True] * 5), ([], [])],
)
def test_groups_that_teach_nothing_get_zeros(estimator: Estimator, rewards: list[float], valid: list[bool]) -> None:
    values = advantages(rewards, valid, estimator)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, np.zeros(len(rewards)), atol=1e-7)


def test_rloo_matches_a_group_of_two_by_hand() -> None:
    np.testing.assert_allclose(advantages([6, 3], [True, True], "rloo"), [3, -3])
