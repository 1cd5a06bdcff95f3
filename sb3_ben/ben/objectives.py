"""The two losses of the paper and the Bellman target between them, as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "add_noise",
    "bellman_target",
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
    scale: float | Tensor = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    r"""The negative evidence lower bound of the hypotheses,

    .. math:: \mathbb{E}_{\phi \sim q_\psi} \Big[ -w \sum_i \log p_B(b_i \mid c_i, \phi) - \log p(\phi) + \log q_\psi(\phi) \Big].

    :param log_likelihood: log p(b | c, phi) (*B, S, N)
    :param log_prior: log p(phi) (*B, S)
    :param log_q: log q(phi) (*B, S)
    :param scale: weight w of the data, the number of all transitions over the number in this batch; a number or (*B)
    :param mask: which of the N transitions count (*B, N), all if not given
    :return: one value per batch dimension (*B)
    """
    if mask is not None:
        log_likelihood = torch.where(mask.bool().unsqueeze(-2), log_likelihood, 0.0)
    energy = -log_likelihood.sum(-1).mean(-1) * scale - log_prior.mean(-1)
    return energy + log_q.mean(-1)


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


def total_variance(means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""The law of total variance over hypotheses,
    :math:`\mathrm{Var}[b] = \mathrm{Var}_\phi \mathbb{E}[b \mid \phi] + \mathbb{E}_\phi \mathrm{Var}[b \mid \phi]`.

    :param means: mean of b under each hypothesis (*B, S, N)
    :param variances: variance of b under each hypothesis (*B, S, N)
    :return: predictive mean, epistemic and aleatoric standard deviation, each (*B, N)
    """
    # Hypotheses come in antithetic pairs: the mean of what is linear in phi is exact, and costs no degree of freedom.
    return means.mean(-2), means.var(-2, correction=0).sqrt(), variances.mean(-2).sqrt()


def add_noise(b: Tensor, scale: float = 0.1, generator: torch.Generator | None = None) -> Tensor:
    """Blur standardised Bellman samples: deterministic transitions would make their likelihood unbounded. The mean stays.

    :param b: standardised Bellman samples (...)
    :param scale: standard deviation of the noise, in standard deviations of b
    :param generator: source of randomness
    """
    return b + scale * torch.randn(b.shape, generator=generator, dtype=b.dtype, device=b.device)


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of what counts."""
    if mask is None:
        return x.mean()
    weight = mask.to(x.dtype)
    return torch.where(mask.bool(), x, 0.0).sum() / weight.sum().clamp_min(1.0)
