"""The two losses of the paper and the Bellman target between them, as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "add_noise",
    "bellman_target",
    "clamp_to_learned",
    "clamp_to_rewards",
    "clamp_to_samples",
    "disadvantages",
    "kl_estimate",
    "masked_mean",
    "msbbe_semi",
    "negative_elbo",
    "one_step_longer",
    "total_variance",
]


def negative_elbo(
    log_likelihood: Tensor,
    log_prior: Tensor,
    log_q: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    r"""The negative evidence lower bound of the hypotheses,

    .. math:: \mathbb{E}_{\phi \sim q_\psi} \Big[-\sum_i w_i \log p_B(b_i \mid c_i, \phi) - \log p(\phi) + \log q_\psi(\phi)\Big]

    :param log_likelihood: log p(b | c, phi) (*B, S, N)
    :param log_prior: log p(phi) (*B, S)
    :param log_q: log q(phi) (*B, S)
    :param counts: how many transitions each of these stands for, w (*B, N); 1 if not given, and nothing counts where it is 0
    :return: one value per batch dimension (*B)
    """
    if counts is not None:
        weights = counts.unsqueeze(-2)
        log_likelihood = weights * torch.where(weights > 0, log_likelihood, 0.0)
    return -log_likelihood.sum(-1).mean(-1) - log_prior.mean(-1) + log_q.mean(-1)


def kl_estimate(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Monte Carlo estimate of KL(q || p) from samples of q: (*B, S) and (*B, S) give (*B)."""
    return (log_q - log_p).mean(-1)


def bellman_target(reward: Tensor, done: Tensor, next_values: Tensor, gamma: float) -> Tensor:
    r"""A sample of the optimal Bellman operator, :math:`b_t = r_t + \gamma (1 - d_t) \max_{a'} Q(h_{t+1}, a')`, without gradient.

    :param reward: rewards (...)
    :param done: whether the episode ended there for good, not by a time limit (...)
    :param next_values: values of the next histories, already maximised over actions (...)
    :param gamma: discount
    """
    # where and not a product: values after the end may be anything, even infinite
    return torch.where(done.bool(), reward, reward + gamma * next_values).detach()


def one_step_longer(b: Tensor, reward: Tensor, done: Tensor, mask: Tensor, gamma: float) -> Tensor:
    r"""Bellman samples over one step more, :math:`r_t + \gamma b_{t+1}`; those at the end of a history stay as they are.

    :param b: Bellman samples (T, ...)
    :param reward: rewards (T, ...)
    :param done: whether the episode ended there for good (T, ...)
    :param mask: which of the T steps of a history are there (T, ...)
    :param gamma: discount
    """
    longer = bellman_target(reward[:-1], done[:-1], b[1:], gamma)
    return torch.cat((torch.where(mask[1:].bool(), longer, b[:-1]), b[-1:]))


def disadvantages(values: Tensor, actions: Tensor, limit: float = torch.inf) -> Tensor:
    r"""By how much actions are worth less than the best ones, :math:`\min(\max_{a'} Q(h_t, a') - Q(h_t, a_t), l)`.

    :param values: values of all actions (..., n_actions)
    :param actions: indices of actions (...)
    :param limit: l; whatever is worse than that is as bad
    """
    return (values.max(dim=-1).values - values.gather(-1, actions[..., None])[..., 0]).clamp(max=limit)


def clamp_to_samples(mean: Tensor, b: Tensor, mask: Tensor) -> Tensor:
    """Predictive means, none of them outside of the range of the Bellman samples that they were predicted beside.

    A mean of b cannot lie outside of the range of b, but that of a flow can, by orders of magnitude, for a few steps while it
    learns; and since b is made of Q, values would follow.

    :param mean: predictive means (..., N)
    :param b: Bellman samples (..., N)
    :param mask: which of them count (..., N); there has to be one
    """
    low, high = (b.masked_fill(~mask.bool(), fill) for fill in (torch.inf, -torch.inf))
    return mean.clamp(low.amin(), high.amax())


def clamp_to_learned(next_values: Tensor, values: Tensor, mask: Tensor, cuts: Tensor) -> Tensor:
    """Values of what follows, where that is never learned of none outside of the range of those that are.

    After a time limit an episode would have gone on, so that its last observation has a value; but nothing is ever tried there,
    and nothing corrects it. What Q makes of it by extrapolation would be handed on.

    :param next_values: values of the histories that follow (...)
    :param values: values of the histories that are learned of (...)
    :param mask: which of these count (...); there has to be one
    :param cuts: where a time limit has cut off what follows (...)
    """
    low, high = (values.masked_fill(mask == 0, fill) for fill in (torch.inf, -torch.inf))
    return torch.where(cuts.bool() & (mask > 0), next_values.clamp(low.amin(), high.amax()), next_values)


def clamp_to_rewards(b: Tensor, rewards: Tensor, gamma: float) -> Tensor:
    r"""Bellman samples, none of them beyond what sums of such rewards can be,
    :math:`[\min(r, 0), \max(r, 0)] / (1 - \gamma)`, with 0 for what follows the end of an episode.

    :param b: Bellman samples (...)
    :param rewards: all rewards that are known (...)
    :param gamma: discount; without one, any sum can be
    """
    if gamma == 1:
        return b
    return b.clamp(rewards.amin().clamp(max=0) / (1 - gamma), rewards.amax().clamp(min=0) / (1 - gamma))


def msbbe_semi(q: Tensor, target_mean: Tensor, mask: Tensor | None = None) -> Tensor:
    r"""Mean squared Bayesian Bellman error to a fixed predictive mean, :math:`(\hat{B}^+ - Q)^2`: the gradient reaches Q alone.

    :param q: values Q(h_t, a_t) (...)
    :param target_mean: predictive means in the units of q (...)
    :param mask: which entries count (...), all if not given
    """
    return masked_mean((target_mean.detach() - q).square(), mask)


def total_variance(means: Tensor, variances: Tensor, blur: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    r"""The law of total variance over hypotheses,
    :math:`\mathrm{Var}[b] = \mathrm{Var}_\phi \mathbb{E}[b \mid \phi] + \mathbb{E}_\phi \mathrm{Var}[b \mid \phi]`.

    :param means: mean of b under each hypothesis (*B, S, N)
    :param variances: variance of b under each hypothesis (*B, S, N)
    :param blur: standard deviation of the noise that was added to b before, which is not the world's and left out
    :return: predictive mean, epistemic and aleatoric standard deviation, each (*B, N)
    """
    # Hypotheses come in antithetic pairs: the mean of what is linear in phi is exact, and costs no degree of freedom.
    return means.mean(-2), means.var(-2, correction=0).sqrt(), (variances.mean(-2) - blur**2).clamp_min(0).sqrt()


def add_noise(b: Tensor, scale: float = 0.1, generator: torch.Generator | None = None) -> Tensor:
    """Blur standardised Bellman samples: deterministic transitions would make their likelihood unbounded. The mean stays.

    :param b: standardised Bellman samples (...)
    :param scale: standard deviation of the noise, in standard deviations of b
    :param generator: source of randomness
    """
    return b + scale * torch.randn(b.shape, generator=generator, dtype=b.dtype, device=b.device)


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of what counts, with weights where the mask has other numbers than 0 and 1."""
    if mask is None:
        return x.mean()
    weights = mask.to(x.dtype)
    return (weights * torch.where(weights > 0, x, 0.0)).sum() / weights.sum().clamp_min(1.0)
