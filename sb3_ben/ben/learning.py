"""What Algorithm 1 of the paper is made of, as functions of a batch of histories and a policy.

Bellman samples, the transitions that they belong to, the negative ELBO of the flows and the MSBBE of Q; then the three operators
that Q can be pulled to, one class each.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch as th

from sb3_ben.ben.exact import bellman_means
from sb3_ben.ben.objectives import (
    add_noise,
    bellman_target,
    clamp_to_learned,
    clamp_to_samples,
    disadvantages,
    kl_estimate,
    msbbe_semi,
    negative_elbo,
    one_step_longer,
    total_variance,
)
from sb3_ben.flows.epistemic import EpistemicFlow, prior_log_prob
from sb3_ben.history.samples import HistoryReplaySamples
from sb3_ben.priors.models import with_last_observations

if TYPE_CHECKING:
    from sb3_ben.ben.policies import BENPolicy, Encoding

__all__ = [
    "OPERATORS",
    "Batch",
    "BellmanSamples",
    "Estimate",
    "FlowOperator",
    "Losses",
    "ModelOperator",
    "Operator",
    "PointOperator",
    "Rule",
    "Seen",
    "bellman_samples",
    "transitions",
    "uncertainties",
]

#: standard deviation of the noise on Bellman samples before their density is taken, in standard deviations of b
BELLMAN_NOISE = 0.3
#: Q is pulled to the predictive mean with this weight and to the Bellman sample with the rest; the paper's 1 is slow until the
#: flows have learned to tell histories apart
FLOW_WEIGHT = 0.25
#: weight of the likelihood's gradient in the encoder of histories, which Q shares with the flows
ENCODER_WEIGHT = 0.1


class Rule(NamedTuple):
    """How Bellman samples are made.

    :param gamma: discount
    :param n_steps: number of steps that they span
    :param double_q: whether the Q-network that learns chooses the next action
    :param action_gap: share of the disadvantage by which they are lowered
    :param action_gap_limit: largest disadvantage that counts for it
    """

    gamma: float
    n_steps: int = 1
    double_q: bool = False
    action_gap: float = 0.0
    action_gap_limit: float = float("inf")


class Seen(NamedTuple):
    """How many transitions there are to learn from, whatever share of a batch each kind has.

    :param real: all that were made, also those that the buffer no longer holds
    :param simulated: all that were simulated
    """

    real: int
    simulated: int = 0


class BellmanSamples(NamedTuple):
    """Samples of the optimal Bellman operator, in the units of rewards.

    :param b: what the flows learn the density of
    :param gaps: by how much Q is to learn less, for other actions than the best, see ``action_gap``
    """

    b: th.Tensor
    gaps: th.Tensor


class Batch(NamedTuple):
    """Transitions of replayed histories after the recurrent pass.

    :param context: (h_t, a_t, q_t), what the aleatoric flow sees
    :param q: Q(h_t, a_t), standardised; with an exact model, for all actions
    :param b: Bellman samples in the units of rewards, or exact means
    :param gaps: by how much Q is to learn less than b
    :param mask: their weights, 0 where there is no transition
    :param counts: how many transitions each of them stands for
    """

    context: th.Tensor
    q: th.Tensor
    b: th.Tensor
    gaps: th.Tensor
    mask: th.Tensor
    counts: th.Tensor


class Estimate(NamedTuple):
    """What hypotheses drawn from the posterior say of transitions.

    :param negative_elbo: per transition, to be minimised
    :param kl: KL(q || prior)
    :param phi: the hypotheses
    :param moments: mean and variance of b under each of them, without gradients; ``None`` where they were not asked for
    """

    negative_elbo: th.Tensor
    kl: th.Tensor
    phi: th.Tensor
    moments: tuple[th.Tensor, th.Tensor] | None


class Losses(NamedTuple):
    """What a gradient step minimises.

    :param total: the sum of its parts
    :param logs: the parts, and both uncertainties in the units of rewards
    """

    total: th.Tensor
    logs: dict[str, th.Tensor]


# ---------------------------------------------------------------------- Bellman samples


@th.no_grad()
def bellman_samples(policy: BENPolicy, histories: HistoryReplaySamples, encoding: Encoding, rule: Rule) -> BellmanSamples:
    """Samples b_t of the optimal Bellman operator ``(T, B)``.

    :param policy: policy, whose target network gives the values
    :param histories: replayed histories
    :param encoding: of all their T + 1 observations, by the network that learns
    :param rule: how samples are made
    """
    values = policy.q_net_target.evaluate(policy.history_input(policy.q_net_target, histories.observed)).q_values
    chosen = (encoding.q_values if rule.double_q else values)[1:].argmax(dim=-1, keepdim=True)
    next_values = values[1:].gather(-1, chosen)[..., 0]
    if histories.cuts is not None:
        next_values = clamp_to_learned(next_values, values[:-1].amax(dim=-1), histories.mask, histories.cuts)
    rewards = policy.expected_rewards(histories)
    b = bellman_target(rewards, histories.dones, policy.bellman_units.unstandardize(next_values), rule.gamma)
    for _ in range(rule.n_steps - 1):
        b = one_step_longer(b, rewards, histories.dones, histories.mask, rule.gamma)
    if not rule.action_gap:
        return BellmanSamples(b, th.zeros_like(b))
    lacks = disadvantages(policy.bellman_units.std * values[:-1], histories.actions, rule.action_gap_limit)
    return BellmanSamples(b, rule.action_gap * lacks)


def transitions(
    policy: BENPolicy, histories: HistoryReplaySamples, encoding: Encoding, samples: BellmanSamples, seen: Seen
) -> Batch:
    """The transitions of encoded histories in one row, without padding and what else does not count: it would take as long.

    :param policy: the policy that encoded them
    :param histories: replayed histories
    :param encoding: of all their T + 1 observations
    :param samples: Bellman samples ``(T, B)``
    :param seen: how many transitions there are
    """
    there = histories.mask.flatten() > 0
    there[0] = True  # something has to be, in a batch where nothing counts as well
    encoding = encoding.map(lambda part: part[:-1].flatten(0, 1)[there])
    parts = (histories.actions, *samples, histories.mask, stands_for(histories, seen))
    actions, b, gaps, mask, counts = (part.flatten(0, 1)[there] for part in parts)
    q = encoding.q_values.gather(-1, actions[..., None])[..., 0]
    return Batch(policy.context(encoding, actions), q, b, gaps, mask, counts)


def stands_for(histories: HistoryReplaySamples, seen: Seen) -> th.Tensor:
    """How many of all transitions each in a batch stands for ``(T, B)``: real ones for real ones, simulated for simulated."""
    n_real = histories.mask.shape[1] - histories.n_simulated
    kinds = zip(histories.mask.split([n_real, histories.n_simulated], dim=1), seen, strict=True)
    return th.cat([mask * (n / mask.sum().clamp_min(1e-9)) for mask, n in kinds], dim=1)


def uncertainties(policy: BENPolicy, estimate: Estimate, mask: th.Tensor) -> tuple[th.Tensor, dict[str, th.Tensor]]:
    """The predictive mean of b of each transition, standardised, and both uncertainties averaged, in the units of rewards."""
    assert estimate.moments is not None, "moments have to be asked for"
    mean, epistemic, chance = total_variance(*estimate.moments, blur=BELLMAN_NOISE)
    logs = {"uncertainty/epistemic": epistemic, "uncertainty/aleatoric": chance}
    return mean, {name: policy.bellman_units.std * (value * mask).sum() / mask.sum() for name, value in logs.items()}


# ---------------------------------------------------------------------- what Q is pulled to


class Operator(abc.ABC):
    """What Q is pulled to.

    :param policy: the policy
    :param n_samples: number of hypotheses in each gradient step
    """

    #: whether both flows learn
    has_flows: ClassVar[bool] = False

    def __init__(self, policy: BENPolicy, n_samples: int) -> None:
        self.policy, self.n_samples = policy, n_samples

    def evaluate(self, histories: HistoryReplaySamples, rule: Rule, seen: Seen) -> Batch:
        """Histories after the recurrent pass, with their Bellman samples, of which the very first define the units."""
        encoding = self.policy.encode(histories.observed).encoding
        samples = bellman_samples(self.policy, histories, encoding, rule)
        if self.policy.bellman_units.count == 0:
            self.policy.update_bellman_units(samples.b, histories.mask)
        return self.arrange(histories, encoding, samples, seen)

    def arrange(self, histories: HistoryReplaySamples, encoding: Encoding, samples: BellmanSamples, seen: Seen) -> Batch:
        """The transitions of encoded histories."""
        return transitions(self.policy, histories, encoding, samples, seen)

    def posterior_loss(self, batch: Batch) -> th.Tensor | None:
        """The negative ELBO, for the flows alone."""
        return None

    @abc.abstractmethod
    def losses(self, batch: Batch) -> Losses:
        """The MSBBE, and the negative ELBO where there are flows."""


class PointOperator(Operator):
    """The Bellman samples themselves: a recurrent DQN, the control of our experiments."""

    def losses(self, batch: Batch) -> Losses:
        msbbe = msbbe_semi(batch.q, self.policy.bellman_units.standardize(batch.b - batch.gaps), batch.mask)
        return Losses(msbbe, {"train/loss": msbbe, "train/msbbe": msbbe})


class FlowOperator(Operator):
    """The predictive Bellman operator of both flows: BEN."""

    has_flows = True

    @property
    def posterior(self) -> EpistemicFlow:
        """q(phi)."""
        return self.policy.epistemic

    def posterior_loss(self, batch: Batch) -> th.Tensor | None:
        return self.estimate(batch._replace(context=batch.context.detach()), with_moments=False).negative_elbo

    def losses(self, batch: Batch) -> Losses:
        # the value of the context itself, whatever the weight: only its gradient is scaled
        context = th.lerp(batch.context.detach(), batch.context, ENCODER_WEIGHT)
        estimate = self.estimate(batch._replace(context=context))
        msbbe, logs = self.msbbe(batch, estimate)
        loss = estimate.negative_elbo + msbbe
        parts = {"train/loss": loss, "train/elbo": -estimate.negative_elbo, "train/msbbe": msbbe, "train/kl": estimate.kl}
        return Losses(loss, parts | logs)

    def estimate(self, batch: Batch, with_moments: bool = True, n_samples: int | None = None) -> Estimate:
        """The negative ELBO per transition, and what else its hypotheses tell.

        :param batch: transitions
        :param with_moments: whether moments are asked for
        :param n_samples: number of hypotheses, by default that of all gradient steps
        """
        phi, log_q = self.posterior.rsample_and_log_prob(n_samples or self.n_samples)
        log_prior = prior_log_prob(self.policy.prior_distribution(), phi)
        blurred = add_noise(self.policy.bellman_units.standardize(batch.b), BELLMAN_NOISE)
        log_likelihood, moments = self.density(blurred, batch.context, phi, with_moments)
        loss = self.negative_elbo(log_likelihood, log_prior, log_q, batch.counts) / batch.counts.sum(dim=-1).clamp_min(1)
        return Estimate(loss.mean(), kl_estimate(log_q, log_prior).mean(), phi.detach(), moments)

    negative_elbo = staticmethod(negative_elbo)

    def density(
        self, b: th.Tensor, context: th.Tensor, phi: th.Tensor, with_moments: bool
    ) -> tuple[th.Tensor, tuple[th.Tensor, th.Tensor] | None]:
        """The log density of b, and its moments under each hypothesis where they are asked for."""
        flow = self.policy.aleatoric
        return flow.log_prob_and_moments(b, context, phi) if with_moments else (flow.log_prob(b, context, phi), None)

    def msbbe(self, batch: Batch, estimate: Estimate) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """The mean squared Bayesian Bellman error, and both uncertainties."""
        b = self.policy.bellman_units.standardize(batch.b)
        mean, logs = uncertainties(self.policy, estimate, batch.mask)
        target = th.lerp(b, clamp_to_samples(mean, b, batch.mask), FLOW_WEIGHT)
        return msbbe_semi(batch.q, target - batch.gaps / self.policy.bellman_units.std, batch.mask), logs


class ModelOperator(PointOperator):
    """The predictive Bellman operator of the prior's exact model, for all actions."""

    def evaluate(self, histories: HistoryReplaySamples, rule: Rule, seen: Seen) -> Batch:
        histories = with_last_observations(histories)
        q_values = self.policy.encode(histories.observed).encoding.q_values[:-1]
        means = bellman_means(self.policy, histories, rule.gamma)
        mask = histories.mask[..., None].expand_as(means)
        if self.policy.bellman_units.count == 0:
            self.policy.update_bellman_units(means, mask)
        return Batch(q_values.detach(), q_values, means, th.zeros_like(means), mask, mask)


#: the names by which users choose what Q is pulled to
OPERATORS: dict[str, type[Operator]] = {"flow": FlowOperator, "point": PointOperator, "model": ModelOperator}
