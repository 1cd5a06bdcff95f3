"""The predictive Bellman operator of an exact model, which takes the place of both flows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_ben.ben.objectives import bellman_target
from sb3_ben.history.samples import HistoryReplaySamples, Observed, map_observations
from sb3_ben.priors.models import BellmanModel, Outcomes, checked_outcomes

if TYPE_CHECKING:
    from sb3_ben.ben.policies import BENPolicy

__all__ = ["bellman_means"]


@th.no_grad()
def bellman_means(policy: BENPolicy, histories: HistoryReplaySamples, gamma: float) -> th.Tensor:
    r"""The predictive Bellman operator of an exact model, for every action after every history, ``(T, B, n_actions)``:

    .. math:: B^+(h_t, a) = \sum_c p(c \mid h_t) \sum_{r, s'} p(r, s' \mid s_t, a, c) (r + \gamma \max_{a'} Q(h_{t+1}, a'))

    :param policy: policy with a model, whose target network gives the values
    :param histories: replayed histories, with the posteriors of the model among their beliefs
    :param gamma: discount
    """
    model, device = cast(BellmanModel, policy.bellman_model), histories.mask.device
    assert histories.beliefs is not None, "an exact model needs its posterior in replay"
    n_steps, n_batch, n_actions = *histories.mask.shape, policy.q_net.n_actions
    n = n_steps * n_batch
    actions = np.tile(np.arange(n_actions), n)
    outcomes = checked_outcomes(model, model.outcomes(_states(policy, histories), actions), n * n_actions)
    rewards, dones = (th.as_tensor(part.reshape(-1), device=device) for part in (outcomes.rewards, outcomes.dones))
    values = _imagined_values(policy, histories, actions, outcomes)
    b = bellman_target(rewards.float(), dones, values, gamma).view(n, n_actions, -1)
    first = 0 if policy.belief is None else int(policy.belief.size)
    posterior = histories.beliefs[:-1, :, first : first + int(model.size)].flatten(0, 1)
    chances = th.as_tensor(outcomes.probabilities, dtype=b.dtype, device=device).view(n, n_actions, int(model.size), -1)
    return th.einsum("nc,nack,nak->na", posterior, chances, b).view(n_steps, n_batch, n_actions)


def _states(policy: BENPolicy, histories: HistoryReplaySamples) -> Any:
    """The last states of all histories, once for each action, in the environment's shape."""

    def states(part: th.Tensor, space: spaces.Space) -> np.ndarray:
        rows = part[:-1].reshape(-1, *cast(tuple[int, ...], space.shape))
        return rows.repeat_interleave(policy.q_net.n_actions, dim=0).cpu().numpy()

    if isinstance(policy.observation_space, spaces.Dict):
        parts = cast(dict[str, th.Tensor], histories.observations)
        return {key: states(parts[key], space) for key, space in policy.observation_space.spaces.items()}
    return states(cast(th.Tensor, histories.observations), policy.observation_space)


def _imagined_values(policy: BENPolicy, histories: HistoryReplaySamples, actions: np.ndarray, outcomes: Outcomes) -> th.Tensor:
    """The target network's best values after every outcome of every action, in the units of rewards, in one row."""
    net, device, n_outcomes = policy.q_net_target, histories.mask.device, outcomes.rewards.shape[1]
    repeats = net.n_actions * n_outcomes
    flat = map_observations(lambda part: np.asarray(part).reshape(-1, *part.shape[2:]), outcomes.observations)
    actions, rewards = np.repeat(actions, n_outcomes), outcomes.rewards.reshape(-1).astype(np.float32)
    beliefs = cast(th.Tensor, histories.beliefs)[:-1].flatten(0, 1).repeat_interleave(repeats, dim=0)
    if policy.tracker is not None and policy.belief is not None:
        features = policy.tracker.imagine(beliefs.cpu().numpy(), flat, actions, rewards)
        beliefs = th.as_tensor(features, device=device)
    imagined = Observed(
        map_observations(lambda part: th.as_tensor(part, device=device)[None], flat),
        th.as_tensor(actions, device=device)[None],
        th.as_tensor(rewards, device=device)[None],
        beliefs[None],
    )
    hidden = tuple(part.repeat_interleave(repeats, dim=1) for part in _hidden_states(policy, histories))
    q_values = net.evaluate(policy.history_input(net, imagined), hidden).q_values
    return policy.bellman_units.unstandardize(q_values[0].max(dim=-1).values)


def _hidden_states(policy: BENPolicy, histories: HistoryReplaySamples) -> tuple[th.Tensor, ...]:
    """The target network's memory after each of the histories' first T observations, ``(layers, T * B, size)``."""
    net = policy.q_net_target
    inputs = policy.history_input(net, histories.observed)
    return tuple(part.flatten(1, 2) for part in net.hidden_states(inputs[:-1]))
