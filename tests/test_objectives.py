"""The losses against exact results."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from sb3_ben.ben.objectives import (
    add_noise,
    bellman_target,
    clamp_to_learned,
    clamp_to_rewards,
    clamp_to_samples,
    disadvantages,
    kl_estimate,
    msbbe_semi,
    negative_elbo,
    one_step_longer,
    total_variance,
)
from sb3_ben.flows.aleatoric import AleatoricFlow
from sb3_ben.flows.epistemic import EpistemicFlow, default_prior
from sb3_ben.flows.units import RunningStandardizer


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def fit_linear_model(
    features: Tensor, b: Tensor, noise: float, half: bool = True, steps: int = 700, loss: Any = negative_elbo
) -> EpistemicFlow:
    """Fit the belief to b = features phi + noise."""
    belief, prior = EpistemicFlow(features.shape[1], hidden_size=16), default_prior(features.shape[1])
    optimizer = torch.optim.Adam(belief.parameters(), lr=1e-2, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        phi, log_q = belief.rsample_and_log_prob(32)
        log_likelihood = Normal(phi @ features.T, noise).log_prob(b) * (1.0 if half else 2.0)
        optimizer.zero_grad()
        loss(log_likelihood, prior.log_prob(phi), log_q).backward()
        optimizer.step()
        schedule.step()
    return belief


def linear_problem(n: int = 40, d: int = 3, noise: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, data, and mean and covariance of the posterior of phi under N(0, 0.1 I)."""
    features = torch.randn(n, d)
    b = features @ torch.tensor([0.6, -0.5, 0.4]) + noise * torch.randn(n)
    covariance = torch.linalg.inv(features.T @ features / noise**2 + torch.eye(d) / 0.1)
    return features, b, covariance @ features.T @ b / noise**2, covariance


def test_exact_elbo_finds_the_conjugate_posterior() -> None:
    features, b, mean, covariance = linear_problem()
    belief = fit_linear_model(features, b, 0.5, steps=1500)
    with torch.no_grad():
        phi, log_q = belief.rsample_and_log_prob(20_000)
    torch.testing.assert_close(phi.mean(0), mean, rtol=0.05, atol=0.005)
    torch.testing.assert_close(phi.std(0), covariance.diagonal().sqrt(), rtol=0.05, atol=0)
    posterior = torch.distributions.MultivariateNormal(mean, covariance)
    assert abs(kl_estimate(log_q, posterior.log_prob(phi))) < 0.02


def test_missing_half_makes_the_belief_too_sure() -> None:
    features, b, _, covariance = linear_problem(n=400)
    belief = fit_linear_model(features, b, 0.5, half=False)
    with torch.no_grad():
        phi, _ = belief.rsample_and_log_prob(5000)
    ratio = (phi.std(0) / covariance.diagonal().sqrt()).mean()
    assert ratio.item() == pytest.approx(math.sqrt(0.5), rel=0.07)


def test_elbo_counts_and_batch() -> None:
    log_likelihood, log_prior, log_q = torch.randn(4, 3, 5), torch.randn(4, 3), torch.randn(4, 3)
    counts = torch.rand(4, 5) * (torch.rand(4, 5) < 0.5)
    loss = negative_elbo(log_likelihood, log_prior, log_q, counts)
    for i in range(4):
        exact = (-(counts[i] * log_likelihood[i]).sum(1) - log_prior[i] + log_q[i]).mean()
        torch.testing.assert_close(loss[i], exact)


def test_masked_entries_carry_no_gradient() -> None:
    log_likelihood = torch.tensor([[1.0, math.nan]], requires_grad=True)
    negative_elbo(log_likelihood, torch.zeros(1), torch.zeros(1), torch.tensor([1.0, 0.0])).backward()
    assert log_likelihood.grad is not None
    assert torch.equal(log_likelihood.grad, torch.tensor([[-1.0, 0.0]]))


def test_values_that_nothing_corrects_stay_in_the_range_of_others() -> None:
    values, mask = torch.tensor([1.0, 2.0, 50.0]), torch.tensor([1.0, 0.5, 0.0])
    next_values, cuts = torch.tensor([9.0, -9.0, 9.0]), torch.tensor([0.0, 1.0, 1.0])
    assert clamp_to_learned(next_values, values, mask, cuts).tolist() == [9.0, 1.0, 9.0]


def test_bellman_target() -> None:
    reward, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, math.inf, -10.0], requires_grad=True)
    target = bellman_target(reward, torch.tensor([0.0, 1.0, 0.0]), values, 0.9)
    torch.testing.assert_close(target, torch.tensor([10.0, 2.0, -6.0]))
    assert not target.requires_grad


def test_semi_gradient() -> None:
    q, target = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    msbbe_semi(q, target, mask=torch.tensor([1, 1, 0, 0])).backward()
    torch.testing.assert_close(q.grad, torch.cat([(q - target).detach()[:2], torch.zeros(2)]))
    assert target.grad is None


def test_total_variance() -> None:
    means, variances = torch.randn(1000, 4), torch.rand(1000, 4)
    mean, epistemic, aleatoric = total_variance(means, variances)
    samples = means + variances.sqrt() * torch.randn(2000, 1000, 4)
    torch.testing.assert_close(mean, means.mean(0))
    torch.testing.assert_close(epistemic.square() + aleatoric.square(), samples.flatten(0, 1).var(0), rtol=0.01, atol=0)
    assert torch.equal(total_variance(means[:1], variances[:1])[1], torch.zeros(4))


def test_spread_of_few_antithetic_hypotheses_is_not_biased() -> None:
    """b that is linear in phi: the mean square of the estimates is the prior's variance."""
    noise = torch.randn(20_000, 2, 1)
    means = torch.cat((noise, -noise), dim=1)
    assert total_variance(means, torch.ones_like(means))[1].square().mean().item() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_standardizer_matches_the_data(scale: float, offset: float) -> None:
    standardizer, b = RunningStandardizer(), scale * (offset + torch.randn(1000))
    for chunk in b.split(100):
        standardizer.update(chunk)
    torch.testing.assert_close(standardizer.mean, b.mean(), rtol=1e-4, atol=1e-6 * scale)
    torch.testing.assert_close(standardizer.std, b.std(correction=0), rtol=1e-4, atol=0)
    torch.testing.assert_close(standardizer.unstandardize(standardizer.standardize(b)), b, rtol=1e-4, atol=1e-5 * scale)


def test_standardizer_ignores_what_is_masked_and_forgets() -> None:
    standardizer = RunningStandardizer(max_count=100)
    standardizer.update(torch.tensor([[1.0, math.nan], [3.0, math.nan]]), mask=torch.tensor([[1, 0], [1, 0]]))
    assert (standardizer.mean.item(), standardizer.var.item(), standardizer.count.item()) == (2.0, 1.0, 2.0)
    standardizer.update(torch.empty(0))
    for _ in range(50):
        standardizer.update(5 + torch.randn(100))
    assert standardizer.mean.item() == pytest.approx(5.0, abs=0.3)
    assert standardizer.std.item() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(
    "rewards", [[0.0], [1.0], [-1e6], [1e-6], [10.0] * 99 + [-500.0], [1e-6, 2e-6], [1e6, -1e6], [1e6, 1e6 + 1]]
)
def test_rewards_of_all_sizes_are_safe(rewards: list[float]) -> None:
    standardizer, b = RunningStandardizer(), torch.tensor(rewards * 8)
    for _ in range(3):
        standardizer.update(b)
    flow, phi = AleatoricFlow(3, 4), torch.randn(2, 4, requires_grad=True)
    context = torch.randn(len(b), 3, requires_grad=True)
    standardized = standardizer.standardize(b)
    log_prob = flow.log_prob(add_noise(standardized), context, phi)
    (log_prob.mean() + flow.mean(context, phi).mean()).backward()
    assert standardized.abs().max() < 20
    for tensor in (log_prob, context.grad, phi.grad, standardizer.unstandardize(flow.mean(context, phi))):
        assert tensor is not None
        assert torch.isfinite(tensor).all()


def test_noise_keeps_the_mean() -> None:
    b = torch.ones(100_000)
    noisy = add_noise(b, 0.1, torch.Generator().manual_seed(0))
    assert noisy.mean().item() == pytest.approx(1.0, abs=1e-3)
    assert noisy.std().item() == pytest.approx(0.1, rel=0.02)


def test_predictive_means_stay_in_the_range_of_the_samples() -> None:
    b, mask = torch.tensor([-1.0, 2.0, 50.0]), torch.tensor([1.0, 1.0, 0.0])
    means = torch.tensor([-30.0, 0.5, 1e6])
    torch.testing.assert_close(clamp_to_samples(means, b, mask), torch.tensor([-1.0, 0.5, 2.0]))


def test_no_value_is_beyond_what_rewards_allow() -> None:
    b, rewards = torch.tensor([-1000.0, -20.0, 3.0, 80.0]), torch.tensor([-10.0, 1.0, 0.0])
    assert torch.allclose(clamp_to_rewards(b, rewards, 0.9), torch.tensor([-100.0, -20.0, 3.0, 10.0]))
    assert torch.allclose(clamp_to_rewards(b, rewards[:1], 0.9), torch.tensor([-100.0, -20.0, 0.0, 0.0]))  # episodes may end
    assert torch.equal(clamp_to_rewards(b, rewards, 1.0), b)


def test_samples_over_several_steps_are_sums_of_rewards() -> None:
    """Three steps, by hand: a history of five, one that is over after three, and one with an end for good after the second."""
    reward, value = torch.rand(5, 3), 10 * torch.rand(5, 3)  # rewards at t, values of what follows t
    mask, done, gamma = torch.ones(5, 3), torch.zeros(5, 3), 0.5
    mask[3:, 1], done[1, 2] = 0, 1
    b = bellman_target(reward, done, value, gamma)
    for _ in range(2):
        b = one_step_longer(b, reward, done, mask, gamma)
    three = reward[0] + gamma * reward[1] + gamma**2 * reward[2] + gamma**3 * value[2]
    torch.testing.assert_close(b[0, :2], three[:2])
    torch.testing.assert_close(b[0, 2], reward[0, 2] + gamma * reward[1, 2])
    torch.testing.assert_close(b[1, 2], reward[1, 2])
    torch.testing.assert_close(b[1, 1], reward[1, 1] + gamma * reward[2, 1] + gamma**2 * value[2, 1])
    torch.testing.assert_close(b[2, 1], reward[2, 1] + gamma * value[2, 1])
    torch.testing.assert_close(b[4, 0], reward[4, 0] + gamma * value[4, 0])


def test_action_gap_grows_and_greedy_values_stay() -> None:
    """Value iteration on a random MDP of five states and three actions, with and without the larger gap."""
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(5, 3, 5, generator=generator, dtype=torch.float64)
    chances /= chances.sum(dim=-1, keepdim=True)
    rewards, gamma, actions = torch.randn(5, 3, generator=generator, dtype=torch.float64), 0.9, torch.arange(3).expand(5, 3)
    rewards[0, 0] = -20.0  # a disaster
    found = []
    for gap, limit in ((0.0, torch.inf), (0.8, torch.inf), (0.8, 3.0)):
        q = torch.zeros(5, 3, dtype=torch.float64)
        for _ in range(3000):
            b = rewards + gamma * chances @ q.max(dim=-1).values
            q = b - gap * disadvantages(q[:, None].expand(5, 3, 3), actions, limit)
        found.append(q)
    plain, wide, limited = found
    for other in (wide, limited):
        assert torch.allclose(other.max(dim=-1).values, plain.max(dim=-1).values)
        assert torch.equal(other.argmax(dim=-1), plain.argmax(dim=-1))
    gaps = [disadvantages(q[:, None].expand(5, 3, 3), actions) for q in found]
    assert torch.allclose(gaps[1], gaps[0] / (1 - 0.8))
    # up to the limit as before, beyond it lowered by no more than a share of the limit
    assert torch.allclose(gaps[2], torch.minimum(gaps[1], gaps[0] + 0.8 * 3.0))
    assert (gaps[2] < gaps[1] - 1).any()
