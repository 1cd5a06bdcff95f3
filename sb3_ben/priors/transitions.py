"""Known transitions: what some actions in some states lead to, whatever the MDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, PyTorchObs, ReplayBufferSamples

from sb3_ben.history.samples import (
    NO_ACTION,
    HistoryReplaySamples,
    Observations,
    as_histories,
    map_observations,
)
from sb3_ben.priors.filters import BeliefTracker

__all__ = ["KnownTransitions", "Transitions", "transition_histories", "with_pasts"]


class Transitions(NamedTuple):
    """A batch of n known transitions, each from the first step of an episode.

    :param observations: s ``(n, ...)``, or a dictionary of them
    :param actions: a, in the environment's own numbers ``(n,)``
    :param rewards: r ``(n,)``
    :param next_observations: s' ``(n, ...)``
    :param dones: whether the episode ends there for good ``(n,)``
    :param once: whether it is known only for the first time that it is done in an episode, as opening a door is ``(n,)``; nowhere
        if not given
    """

    observations: Any
    actions: np.ndarray
    rewards: np.ndarray
    next_observations: Any
    dones: np.ndarray
    once: np.ndarray | None = None


class KnownTransitions:
    """A sampler of known transitions from two parts: which (s, a) are known, and what follows them.

    :param pairs: draws n pairs, ``n -> (observations, actions)``
    :param outcomes: draws what follows, ``(observations, actions) -> (rewards, next observations, dones)``
    """

    def __init__(
        self,
        pairs: Callable[[int], tuple[Any, np.ndarray]],
        outcomes: Callable[[Any, np.ndarray], tuple[np.ndarray, Any, np.ndarray]],
    ) -> None:
        self.pairs, self.outcomes = pairs, outcomes

    def __call__(self, n: int) -> Transitions:
        observations, actions = self.pairs(n)
        return Transitions(observations, actions, *self.outcomes(observations, actions))


def transition_histories(
    batch: Transitions,
    observation_space: spaces.Space,
    action_space: spaces.Discrete,
    tracker: BeliefTracker | None,
    device: th.device,
) -> HistoryReplaySamples:
    """Known transitions as histories of a single step, after a look at shapes, spaces and numbers.

    :param batch: the transitions
    :param observation_space: observation space of the algorithm
    :param action_space: its action space
    :param tracker: filters to run along, if any
    :param device: device of the result
    """
    batch = Transitions(*batch)
    actions, rewards, dones = (np.asarray(part) for part in (batch.actions, batch.rewards, batch.dones))
    n = len(actions)
    for name, part in (("actions", actions), ("rewards", rewards), ("dones", dones)):
        if part.shape != (n,):
            raise ValueError(f"`{name}` of known transitions must have shape ({n},), got {part.shape}")
    start = int(action_space.start)
    if not np.issubdtype(actions.dtype, np.integer) or actions.min() < start or actions.max() >= start + action_space.n:
        raise ValueError(f"`actions` of known transitions must be integers of {action_space}, got {actions}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"`rewards` of known transitions are not finite: {rewards}")
    pairs = (("observations", batch.observations), ("next_observations", batch.next_observations))
    observations, successors = (_checked_observations(part, observation_space, n, name) for name, part in pairs)

    def to_tensor(array: np.ndarray) -> th.Tensor:
        return th.as_tensor(array, device=device)

    samples_class: Any = DictReplayBufferSamples if isinstance(observations, dict) else ReplayBufferSamples
    samples = samples_class(
        observations=map_observations(to_tensor, observations),
        actions=to_tensor(actions.astype(np.int64)),
        next_observations=map_observations(to_tensor, successors),
        dones=to_tensor(dones.astype(np.float32)),
        rewards=to_tensor(rewards.astype(np.float32)),
    )
    histories = as_histories(samples, start)
    if tracker is None:
        return histories
    now = tracker.begin(observations)
    after = tracker.advance(now.state, successors, actions - start, rewards)
    return histories._replace(beliefs=to_tensor(np.stack((now.features, after.features))))


def with_pasts(histories: HistoryReplaySamples, length: int, once: np.ndarray | None = None) -> HistoryReplaySamples:
    """Known transitions after a past: the last of ``length`` steps each, of which the others are other known transitions.

    What is known of a transition holds whatever came before. Seen only at the beginning of episodes, it would say nothing about
    the memory that an agent arrives with, and the successors would be valued by a network that has never learned of such
    memories: values run away. No past goes on after the end of an episode, and what is known for the first time only says nothing
    once the past has it.

    :param histories: ``length`` times as many histories of a single step
    :param length: number of steps of the histories that they become
    :param once: which of them are known only for the first time
    """

    def rows(part: th.Tensor) -> th.Tensor:
        return part.unflatten(0, (length, -1))

    actions, rewards, dones = (rows(part[0]) for part in (histories.actions, histories.rewards, histories.dones))
    mask = th.zeros_like(rewards)
    mask[-1] = (dones[:-1].sum(dim=0) == 0).to(mask.dtype)
    if once is not None:
        is_again = _done_before(map_observations(lambda part: rows(part[0]), histories.observations), actions)
        mask[-1] *= ~(is_again & rows(th.as_tensor(once, device=mask.device).bool())[-1])
    return HistoryReplaySamples(
        observations=map_observations(lambda part: th.cat((rows(part[0]), rows(part[1])[-1:])), histories.observations),
        previous_actions=th.cat((th.full_like(actions[:1], NO_ACTION), actions)),
        previous_rewards=th.cat((th.zeros_like(rewards[:1]), rewards)),
        actions=actions,
        rewards=rewards,
        dones=dones,
        mask=mask,
    )


def _done_before(observations: PyTorchObs, actions: th.Tensor) -> th.Tensor:
    """Which of the last observations and actions ``(T, B, ...)`` stand in their own past already ``(B,)``."""
    parts = list(observations.values()) if isinstance(observations, dict) else [observations]
    same = [(part[:-1] == part[-1:]).flatten(2).all(dim=-1) if part.dim() > 2 else part[:-1] == part[-1:] for part in parts]
    return th.stack([*same, actions[:-1] == actions[-1:]]).all(dim=0).any(dim=0)


def _checked_observations(observations: Any, space: spaces.Space, n: int, name: str) -> Observations:
    """Observations of the space, in its type."""
    if isinstance(space, spaces.Dict):
        if not isinstance(observations, dict) or set(observations) != set(space.spaces):
            raise ValueError(f"`{name}` of known transitions must be a dictionary with the keys {list(space.spaces)}")
        checked = {key: _checked_observations(observations[key], part, n, f"{name}[{key!r}]") for key, part in space.items()}
        return cast(Observations, checked)
    array = np.asarray(observations)
    if array.shape != (n, *space.shape):  # type: ignore[misc]
        raise ValueError(f"`{name}` of known transitions must have shape {(n, *space.shape)}, got {array.shape}")  # type: ignore[misc]
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` of known transitions are not finite")
    return array.astype(space.dtype)
