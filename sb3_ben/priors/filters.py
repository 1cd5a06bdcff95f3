"""Beliefs: recursive filters of the user's whose output joins the learned encoding of the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import torch as th

from sb3_ben.history.samples import (
    NO_ACTION,
    Observations,
    map_observations,
    with_rows,
)

__all__ = ["Belief", "BeliefState", "BeliefTracker", "Believed", "RewardBelief"]

#: arrays with one row per environment; a filter keeps in them whatever it has to remember of an episode
BeliefState = tuple[np.ndarray, ...]


@runtime_checkable
class Belief(Protocol):
    """A recursive filter of the user's: Kalman, particles, or exact as those of :mod:`sb3_ben.oracles`.

    It must keep nothing of an episode in itself: everything travels in the state, as with a recurrent policy.
    """

    @property
    def size(self) -> int:
        """Number of features."""
        ...

    def initial(self, n_envs: int) -> BeliefState:
        """The state before the first observation of ``n_envs`` episodes: arrays of numbers with one row per episode."""
        ...

    def update(
        self, state: BeliefState, observations: Any, previous_actions: np.ndarray, previous_rewards: np.ndarray
    ) -> BeliefState:
        """The state after new observations.

        :param state: the state before, not to be changed in place
        :param observations: the environment's observations, ``(n_envs, ...)``, or a dictionary of them
        :param previous_actions: the actions that led there, counted from 0; -1 for the first observation of an episode
        :param previous_rewards: the rewards on the way; 0 for a first observation, NaN where they are not known
        """
        ...

    def features(self, state: BeliefState) -> np.ndarray:
        """What the networks get to see, ``(n_envs, size)``: all of a size of about one."""
        ...


@runtime_checkable
class RewardBelief(Belief, Protocol):
    """A filter that also knows what rewards to expect.

    Then Bellman samples are made of these instead of the rewards that happened to come: their mean is the same, and what a rare
    and large reward does to a sample is gone.
    """

    def rewards(self, state: BeliefState) -> np.ndarray:
        """The expected reward of every action, given the history, ``(n_envs, n_actions)``."""
        ...


class Believed(NamedTuple):
    """What filters have made of histories.

    :param state: their state
    :param features: their features ``(n_envs, dim)``
    """

    state: BeliefState
    features: np.ndarray


class BeliefTracker:
    """Runs the user's filters beside the agent, and looks at everything they return.

    Features are those of all filters in turn. With ``keep_state`` the state of the first filter follows, flattened: replay needs
    it to imagine what the filter would say after other outcomes. Expected rewards of all actions come last, where the first
    filter is a :class:`RewardBelief`.

    :param filters: the filters
    :param keep_state: whether features include the first filter's state
    :param n_actions: number of actions
    """

    def __init__(self, filters: Sequence[Belief], keep_state: bool = False, n_actions: int = 0) -> None:
        self.filters, self.keep_state = tuple(filters), keep_state
        self.n_rewards = n_actions if isinstance(self.filters[0], RewardBelief) else 0
        initial = [self._checked(one, "initial", one.initial(1), 1) for one in self.filters]
        self.shapes = [[part.shape[1:] for part in state] for state in initial]
        self.dtypes = [[part.dtype for part in state] for state in initial]
        self.sizes = [int(one.size) for one in self.filters]
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"`size` of a belief must be at least 1, got {self.sizes}")
        kept = sum(int(np.prod(shape)) for shape in self.shapes[0]) if keep_state else 0
        self.dim = sum(self.sizes) + kept + self.n_rewards

    def initial(self, n_envs: int) -> BeliefState:
        """The state before the first observations."""
        return tuple(part for one in self.filters for part in one.initial(n_envs))

    def begin(self, observations: Observations) -> Believed:
        """What the first observations of episodes tell."""
        n_envs = _length(observations)
        return self.advance(self.initial(n_envs), observations, np.full(n_envs, NO_ACTION), np.zeros(n_envs))

    def advance(self, state: BeliefState, observations: Observations, actions: np.ndarray, rewards: np.ndarray) -> Believed:
        """What new observations tell; actions are counted from 0."""
        n_envs = len(actions)
        rewards = np.where(actions == NO_ACTION, 0.0, rewards)  # what came before an episode is not its business
        observations = map_observations(np.asarray, observations)
        states, features = [], []
        for one, before in zip(self.filters, self._split(state), strict=True):
            after = self._checked(one, "update", one.update(before, observations, actions, rewards), n_envs)
            if [part.shape for part in after] != [part.shape for part in before]:
                raise ValueError(f"update() of {type(one).__name__} changed the shapes of its state")
            states.append(after)
            features.append(self._checked_features(one, after, n_envs))
        if self.keep_state:
            features.append(np.concatenate([part.reshape(n_envs, -1) for part in states[0]], axis=1).astype(np.float32))
        if self.n_rewards:
            features.append(self._checked_rewards(states[0], n_envs))
        joined = features[0] if len(features) == 1 else np.concatenate(features, axis=1)
        return Believed(tuple(part for after in states for part in after), joined)

    def restart(self, believed: Believed | None, observations: Observations, starts: np.ndarray) -> Believed:
        """Begin anew where episodes have started, and keep the rest."""
        if believed is None or len(believed.features) != len(starts) or starts.all():
            return self.begin(observations)
        if not starts.any():
            return believed
        fresh = self.begin(map_observations(lambda part: np.asarray(part)[starts], observations))
        return Believed(
            tuple(with_rows(old, starts, new) for old, new in zip(believed.state, fresh.state, strict=True)),
            with_rows(believed.features, starts, fresh.features),
        )

    def reset(self, state: BeliefState, starts: np.ndarray) -> BeliefState:
        """The state with the rows of new episodes replaced by initial ones."""
        if not starts.any():
            return state
        fresh = self.initial(int(starts.sum()))
        return tuple(with_rows(old, starts, new) for old, new in zip(state, fresh, strict=True))

    def kept_state(self, features: np.ndarray) -> BeliefState:
        """The first filter's state from features ``(n, dim)`` that include it."""
        columns, parts = sum(self.sizes), []
        for shape, dtype in zip(self.shapes[0], self.dtypes[0], strict=True):
            width = int(np.prod(shape))
            parts.append(features[:, columns : columns + width].reshape(len(features), *shape).astype(dtype))
            columns += width
        return tuple(parts)

    def imagine(self, features: np.ndarray, observations: Observations, actions: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        """The first filter's features after outcomes that have not happened, from features that include its state."""
        one = self.filters[0]
        after = one.update(self.kept_state(features), observations, actions, rewards)
        return self._checked_features(one, after, len(actions))

    def expected_rewards(self, beliefs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """What the first filter expected of actions ``(...)``, counted from 0, from features ``(..., dim)``."""
        return beliefs[..., self.dim - self.n_rewards :].gather(-1, actions[..., None])[..., 0]

    def _checked_rewards(self, state: BeliefState, n_envs: int) -> np.ndarray:
        one = cast(RewardBelief, self.filters[0])
        rewards = np.asarray(one.rewards(state), dtype=np.float32)
        if rewards.shape != (n_envs, self.n_rewards) or not np.isfinite(rewards).all():
            raise ValueError(f"rewards() of {type(one).__name__} must return finite numbers of shape {(n_envs, self.n_rewards)}")
        return rewards

    def _split(self, state: BeliefState) -> list[BeliefState]:
        parts, start = [], 0
        for shapes in self.shapes:
            parts.append(tuple(state[start : start + len(shapes)]))
            start += len(shapes)
        return parts

    @staticmethod
    def _checked(one: Belief, method: str, state: Any, n_envs: int) -> BeliefState:
        name = f"{method}() of {type(one).__name__}"
        if not isinstance(state, tuple) or not all(isinstance(part, np.ndarray) for part in state):
            raise ValueError(f"{name} must return a tuple of arrays, got {type(state).__name__}")
        for part in state:
            if part.shape[:1] != (n_envs,):
                raise ValueError(f"{name} must return arrays with {n_envs} rows, one per environment, got shape {part.shape}")
            if part.dtype.kind not in "biuf":
                raise ValueError(f"{name} must return arrays of numbers, got {part.dtype}")
        return state

    @staticmethod
    def _checked_features(one: Belief, state: BeliefState, n_envs: int) -> np.ndarray:
        features = np.asarray(one.features(state), dtype=np.float32)
        name = f"features() of {type(one).__name__}"
        if features.shape != (n_envs, one.size):
            raise ValueError(f"{name} must have shape {(n_envs, one.size)}, got {features.shape}")
        if not np.isfinite(features).all():
            raise ValueError(f"{name} are not finite (rewards are NaN where they are not known)")
        return features


def _length(observations: Observations) -> int:
    return len(next(iter(observations.values())) if isinstance(observations, dict) else observations)
