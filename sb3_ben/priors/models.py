"""Exact models: the posterior over a few MDPs and what each of them does, in place of both flows."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch as th

from sb3_ben.history.samples import (
    NO_ACTION,
    HistoryReplaySamples,
    Observations,
    map_observations,
)
from sb3_ben.priors.filters import Belief, BeliefTracker

__all__ = ["BellmanModel", "Outcomes", "checked_outcomes", "first_histories", "with_last_observations"]


class Outcomes(NamedTuple):
    """What n pairs of state and action can lead to: K possibilities each, some of which may have probability 0.

    :param probabilities: of each outcome in each of C contexts, ``(n, C, K)``
    :param rewards: ``(n, K)``
    :param observations: successors ``(n, K, ...)``, or a dictionary of them
    :param dones: whether the episode ends there for good, ``(n, K)``
    """

    probabilities: np.ndarray
    rewards: np.ndarray
    observations: Any
    dones: np.ndarray


@runtime_checkable
class BellmanModel(Belief, Protocol):
    """A finite set of MDPs (contexts) with their exact posterior: a filter whose features are the probabilities of the contexts.

    With it, the predictive Bellman operator of every action is a sum over contexts and outcomes, and no flow is needed.
    """

    def outcomes(self, observations: Any, actions: np.ndarray) -> Outcomes:
        """What actions (counted from 0) in the given states lead to in each context.

        :param observations: ``(n, ...)``, or a dictionary of them
        :param actions: ``(n,)``
        """
        ...


def checked_outcomes(model: BellmanModel, outcomes: Outcomes, n: int) -> Outcomes:
    """Outcomes of n pairs, after a look at shapes and numbers."""
    name = f"outcomes() of {type(model).__name__}"
    outcomes = Outcomes(np.asarray(outcomes[0]), np.asarray(outcomes[1]), outcomes[2], np.asarray(outcomes[3]))
    n_outcomes = outcomes.rewards.shape[-1]
    shapes = {"probabilities": (n, int(model.size), n_outcomes), "rewards": (n, n_outcomes), "dones": (n, n_outcomes)}
    for part, shape in shapes.items():
        if getattr(outcomes, part).shape != shape:
            raise ValueError(f"`{part}` in {name} must have shape {shape}, got {getattr(outcomes, part).shape}")
    if not np.isfinite(outcomes.rewards).all():
        raise ValueError(f"`rewards` in {name} are not finite")
    chances = outcomes.probabilities
    if not (chances.min() >= 0 and np.allclose(chances.sum(axis=-1), 1)):
        raise ValueError(f"`probabilities` in {name} must not be negative and sum to 1 over the outcomes in every context")
    return outcomes


def first_histories(observations: Observations, tracker: BeliefTracker, device: th.device) -> HistoryReplaySamples:
    """Histories of no transition at all: first observations and what filters make of them.

    :param observations: first observations ``(n, ...)``
    :param tracker: filters
    :param device: device of the result
    """
    features = th.as_tensor(tracker.begin(observations).features, device=device)[None]
    nothing = th.zeros(features.shape[:2], device=device)
    return HistoryReplaySamples(
        observations=map_observations(lambda part: th.as_tensor(np.asarray(part), device=device)[None], observations),
        previous_actions=nothing.long() + NO_ACTION,
        previous_rewards=nothing,
        actions=nothing[:0].long(),
        rewards=nothing[:0],
        dones=nothing[:0],
        mask=nothing[:0],
        beliefs=features,
    )


def with_last_observations(histories: HistoryReplaySamples) -> HistoryReplaySamples:
    """Histories whose last observations count, too, unless they are the end: what has not been tried there is no secret to an
    exact model, and it is there that the agent is to act.

    :param histories: replayed histories
    """

    def again(part: th.Tensor) -> th.Tensor:
        return th.cat((part, part[-1:]))

    nothing = th.zeros_like(histories.previous_rewards[:1])
    begins = histories.mask[:1] if len(histories.mask) else nothing + 1
    is_left = th.cat((begins, histories.mask * (1 - histories.dones)))
    chosen: dict[str, Any] = {"actions": histories.actions, "rewards": histories.rewards, "dones": histories.dones}
    untried: dict[str, Any] = {name: th.cat((part, nothing.to(part.dtype))) for name, part in chosen.items()}
    return HistoryReplaySamples(
        observations=map_observations(again, histories.observations),
        previous_actions=again(histories.previous_actions),
        previous_rewards=again(histories.previous_rewards),
        mask=th.maximum(th.cat((histories.mask, nothing)), is_left),
        beliefs=None if histories.beliefs is None else again(histories.beliefs),
        **untried,
    )
