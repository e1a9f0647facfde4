"""The losses equal published values, whatever the micro-batches, and nothing masked leaks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from learner.loss import AGGREGATIONS, PolicyLossConfig, PolicySums, policy_loss, sft_loss, token_weights

OLD = torch.tensor([[-1, -0.7, -0.2, -2], [-0.5, -1.5, -0.9, 0], [-0.3, -0.3, -3, -1.2]])
NEW = torch.tensor([[-0.8, -0.9, -0.1, -1.2], [-0.9, -1.4, -0.9, 0], [-0.3, -0.1, -2, -1.9]])
BEHAVIOUR = torch.tensor([[-1.1, -0.7, -0.25, -2.3], [-0.5, -1.45, -0.8, 0], [-0.3, -0.4, -3.9, -1.1]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 0, 1, 1]]).bool()
ADVANTAGES = torch.tensor([1.5, -1, -0.5])[:, None].expand(3, 4)
TRAJECTORY = torch.arange(3)[:, None].expand(3, 4)


def weights(name: str, constant_length: float = 4.0) -> Tensor:
    return token_weights(MASK.flatten(), TRAJECTORY.flatten(), 3, AGGREGATIONS[name], constant_length)


def run(
    logprobs: Tensor, name: str = "dapo", *, old: Tensor = OLD, config: PolicyLossConfig | None = None
) -> tuple[Tensor, PolicySums]:
    columns = (logprobs, old, BEHAVIOUR, ADVANTAGES, MASK)
    return policy_loss(config or PolicyLossConfig(), *(column.flatten() for column in columns), weights(name))


@pytest.mark.parametrize(
    ("name", "tis_cap", "value", "grad_sum"),
    [
        ("dapo", 0.0, -0.1473645, 0.8682269),
        ("grpo", 0.0, 0.0206494, 0.8336422),
        ("dr_grpo", 0.0, -0.1228037, 0.7235224),
        ("dapo", 2.0, -0.1251039, None),
    ],
)
def test_losses_equal_the_values_that_other_trainers_give(
    name: str, tis_cap: float, value: float, grad_sum: float | None
) -> None:
    logprobs = NEW.clone().requires_grad_()
    loss, sums = run(logprobs, name, config=PolicyLossConfig(tis_cap=tis_cap))
    assert loss.item() == pytest.approx(value, abs=1e-6)
    loss.backward()
    if grad_sum is not None:
        assert logprobs.grad.abs().sum().item() == pytest.approx(grad_sum, abs=1e-6)
    assert sums.metrics()["clipfrac"] == pytest.approx(0.3)


def test_the_token_sum_follows_from_the_mean() -> None:
    loss, _ = run(NEW)
    assert loss.item() * int(MASK.sum()) == pytest.approx(-1.4736447, abs=1e-5)


def test_mismatch_metrics_equal_published_values() -> None:
    metrics = run(OLD)[1].metrics()
    assert metrics["mismatch_kl"] == pytest.approx(0.062681, abs=1e-6)
    ratios = (OLD - BEHAVIOUR)[MASK].exp()
    assert metrics["is_mean"] == pytest.approx(ratios.mean().item(), abs=1e-6)
    assert metrics["is_max"] == pytest.approx(ratios.max().item(), abs=1e-6)
    square_mean = metrics["is_mean"] ** 2 / metrics["is_ess"]
    assert square_mean - 1 == pytest.approx(0.574064, abs=1e-5), "chi-square per token"
    capped = ratios.clamp(max=2.0)
    assert capped.mean().item() == pytest.approx(1.126721, abs=1e-6)


@pytest.mark.parametrize("name", list(AGGREGATIONS))
@pytest.mark.parametrize("cuts", [[(0, 1), (1, 3)], [(0, 1), (1, 2), (2, 3)], [(0, 3), (3, 3)]])
def test_micro_batches_add_up_to_the_whole_step(name: str, cuts: list[tuple[int, int]]) -> None:
    whole_logprobs = NEW.clone().requires_grad_()
    whole, whole_sums = run(whole_logprobs, name)
    whole.backward()
    logprobs = NEW.clone().requires_grad_()
    all_weights = weights(name).view(3, 4)
    total, sums = 0.0, PolicySums()
    for start, end in cuts:
        columns = (logprobs, OLD, BEHAVIOUR, ADVANTAGES, MASK, all_weights)
        part, part_sums = policy_loss(PolicyLossConfig(), *(column[start:end].flatten() for column in columns))
        part.backward()
        total += part.item()
        sums.add(part_sums)
    assert total == pytest.approx(whole.item(), abs=1e-6)
    assert torch.allclose(logprobs.grad, whole_logprobs.grad, atol=1e-7)
    assert sums.metrics() == pytest.approx(whole_sums.metrics(), abs=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_lies_under_the_mask_never_leaks(poison: float) -> None:
    clean = NEW.clone().requires_grad_()
    expected, _ = run(clean)
    expected.backward()
    logprobs = torch.where(MASK, NEW, poison).requires_grad_()
    old = torch.where(MASK, OLD, poison)
    loss, sums = run(logprobs, old=old)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item())
    assert torch.equal(logprobs.grad, clean.grad)
    assert all(math.isfinite(value) for value in sums.metrics().values())


@pytest.mark.parametrize("name", list(AGGREGATIONS))
def test_a_step_without_any_trained_token_is_a_finite_zero(name: str) -> None:
    mask = torch.zeros(5).bool()
    weights_n = token_weights(mask, torch.tensor([0, 0, 1, 1, 1]), 2, AGGREGATIONS[name], 4.0)
    logprobs = torch.full((5,), -1.0, requires_grad=True)
    loss, sums = policy_loss(
        PolicyLossConfig(), logprobs, logprobs.detach(), logprobs.detach(), logprobs.detach(), mask, weights_n
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.abs().sum() == 0
    assert all(math.isfinite(value) for value in sums.metrics().values())
    assert sft_loss(logprobs, mask, weights_n).item() == 0.0


def test_trajectories_without_a_trained_token_do_not_dilute_the_others() -> None:
    mask = torch.tensor([True, True, False])
    trajectory = torch.tensor([0, 1, 2])
    assert token_weights(mask, trajectory, 3, "trajectory_mean").tolist() == [0.5, 0.5, 0.0]
    assert token_weights(mask, trajectory, 3, "constant_length", 2.0).tolist() == [0.25, 0.25, 0.0]


def test_supervised_loss_is_the_mean_cross_entropy() -> None:
    loss = sft_loss(NEW.flatten(), MASK.flatten(), weights("dapo"))
    assert loss.item() == pytest.approx(-NEW[MASK].mean().item(), abs=1e-6)
