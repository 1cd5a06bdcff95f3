"""Batches of histories, and what is done to the observations in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, PyTorchObs, ReplayBufferSamples

__all__ = [
    "NO_ACTION",
    "HistoryReplaySamples",
    "Observations",
    "Observed",
    "as_histories",
    "join_histories",
    "map_observations",
    "terminal_observations",
    "with_rows",
]

Observations = np.ndarray | dict[str, np.ndarray]

NO_ACTION = -1


class Observed(NamedTuple):
    """What a network sees of a batch of B histories, time first.

    :param observations: ``(T, B, ...)``
    :param previous_actions: the action before each observation, -1 where an episode begins, ``(T, B)``
    :param previous_rewards: the original reward before each observation, 0 where an episode begins, ``(T, B)``
    :param beliefs: what filters given by the user made of the history up to each observation, ``(T, B, size)``
    """

    observations: PyTorchObs
    previous_actions: th.Tensor
    previous_rewards: th.Tensor
    beliefs: th.Tensor | None = None


class HistoryReplaySamples(NamedTuple):
    """A batch of B histories of at most T transitions, time first, shorter ones padded at the end.

    :param observations: s_0 .. s_T, the successor of the last transition included, shape ``(T + 1, B, ...)``
    :param previous_actions: the action before each observation, -1 where an episode begins, ``(T + 1, B)``
    :param previous_rewards: the original reward before each observation, 0 where an episode begins, ``(T + 1, B)``
    :param actions: indices of actions, from 0 also where the action space starts elsewhere, ``(T, B)``
    :param rewards: normalised if the environment is, ``(T, B)``
    :param dones: 1 where the episode really ended (not at a time limit), ``(T, B)``
    :param mask: 0 in the padding, and 1 where there is a transition; less in the first steps of histories that begin in the
        middle of an episode, whose memory is not what it would have been, ``(T, B)``
    :param beliefs: what filters given by the user made of the history up to each observation, ``(T + 1, B, size)``
    :param cuts: 1 where a time limit cut the episode off: of what follows nothing is ever learned, ``(T, B)``
    :param n_simulated: how many of the histories are simulated; they come last
    """

    observations: PyTorchObs
    previous_actions: th.Tensor
    previous_rewards: th.Tensor
    actions: th.Tensor
    rewards: th.Tensor
    dones: th.Tensor
    mask: th.Tensor
    beliefs: th.Tensor | None = None
    cuts: th.Tensor | None = None
    n_simulated: int = 0

    @property
    def observed(self) -> Observed:
        """What a network sees of them."""
        return Observed(self.observations, self.previous_actions, self.previous_rewards, self.beliefs)


def as_histories(samples: ReplayBufferSamples | DictReplayBufferSamples, start: int = 0) -> HistoryReplaySamples:
    """Transitions from a replay buffer that knows no histories (hindsight replay, for one) as histories of a single step.

    :param samples: transitions
    :param start: the smallest action
    """
    actions = samples.actions.long().reshape(1, -1) - start
    nothing = th.full_like(actions, NO_ACTION)
    rewards, dones = samples.rewards.reshape(1, -1), samples.dones.reshape(1, -1)
    return HistoryReplaySamples(
        observations=map_observations(lambda *steps: th.stack(steps), samples.observations, samples.next_observations),
        previous_actions=th.cat((nothing, actions)),
        previous_rewards=th.cat((th.zeros_like(rewards), rewards)),
        actions=actions,
        rewards=rewards,
        dones=dones,
        mask=th.ones_like(rewards),
    )


def join_histories(first: HistoryReplaySamples, second: HistoryReplaySamples) -> HistoryReplaySamples:
    """Two batches of histories as one, the shorter ones padded at the end."""
    n_steps = max(len(first.mask), len(second.mask))

    def join(one: th.Tensor, other: th.Tensor, length: int) -> th.Tensor:
        # padding repeats the last row: it has to be valid input, and the mask hides it
        padded = [part[th.arange(length, device=part.device).clamp(max=len(part) - 1)] for part in (one, other)]
        return th.cat(padded, dim=1)

    def join_mask(mask: th.Tensor) -> th.Tensor:
        return th.cat((mask, mask.new_zeros(n_steps - len(mask), mask.shape[1])))

    joined: dict[str, Any] = {"mask": th.cat((join_mask(first.mask), join_mask(second.mask)), dim=1)}
    for name in ("actions", "rewards", "dones"):
        joined[name] = join(getattr(first, name), getattr(second, name), n_steps)
    for name in ("observations", "previous_actions", "previous_rewards"):
        join_steps = lambda one, other: join(one, other, n_steps + 1)  # noqa: E731
        joined[name] = map_observations(join_steps, getattr(first, name), getattr(second, name))
    if first.beliefs is not None and second.beliefs is not None:
        joined["beliefs"] = join(first.beliefs, second.beliefs, n_steps + 1)
    if first.cuts is not None and second.cuts is not None:
        joined["cuts"] = join(first.cuts, second.cuts, n_steps)
    return HistoryReplaySamples(**joined, n_simulated=first.n_simulated + second.n_simulated)


def map_observations(function: Callable[..., Any], *observations: Any) -> Any:
    """Apply a function to observations, or to each entry of dictionaries of them."""
    if isinstance(observations[0], dict):
        return {key: function(*(obs[key] for obs in observations)) for key in observations[0]}
    return function(*observations)


def terminal_observations(observations: Observations, dones: np.ndarray, infos: list[dict[str, Any]]) -> Observations:
    """The successors of a step: new observations, and where episodes ended, the last ones of these."""
    ended = [i for i in np.flatnonzero(dones) if infos[i].get("terminal_observation") is not None]
    if not ended:
        return map_observations(np.asarray, observations)
    last = [infos[i]["terminal_observation"] for i in ended]
    if isinstance(observations, dict):
        by_key = {key: np.stack([one[key] for one in last]) for key in observations}
        return {key: with_rows(np.asarray(part), np.array(ended), by_key[key]) for key, part in observations.items()}
    return with_rows(np.asarray(observations), np.array(ended), np.stack(last))


def with_rows(array: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    array = array.copy()
    array[rows] = values
    return array
