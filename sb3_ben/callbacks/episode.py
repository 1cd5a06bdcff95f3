"""One greedy episode, and what the agent believes at each of its steps; in any environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_ben.history.previous_reward import attach_reward, previous_reward
from sb3_ben.oracles.base import OracleState

if TYPE_CHECKING:
    from sb3_ben.ben.ben import BEN, BellmanDistribution

__all__ = ["ExactBelief", "Moment", "normalized", "play"]


class Moment(NamedTuple):
    """One step of an episode.

    :param observation: what the agent sees, with the reward it has just received
    :param state: what it remembers, this observation included
    :param beliefs: what it believes of b, for each action
    :param action: what it does, counted from 0 as in ``beliefs``
    :param exact: the exact posterior, where there is one
    :param frame: a picture of the environment
    """

    observation: Any
    state: tuple[np.ndarray, ...]
    beliefs: BellmanDistribution
    action: int
    exact: Any
    frame: np.ndarray | None


class ExactBelief:
    """The exact posterior in the course of an episode in which somebody else acts, in the form that pictures show.

    :param oracle: keeps this posterior in its state, and reads it there (``beliefs``)
    """

    def __init__(self, oracle: Any) -> None:
        self.oracle = oracle
        self._state: OracleState | None = None

    def after(self, observation: np.ndarray) -> Any:
        """The posterior after one more observation, which carries its reward."""
        _, self._state = self.oracle.predict(observation, self._state)
        return self.oracle.beliefs(self._state)[0]

    def act(self, actions: np.ndarray) -> None:
        """Somebody has acted."""
        assert self._state is not None, "an episode begins with an observation"
        self._state = self.oracle.with_actions(self._state, actions)


def play(model: BEN, venv: VecEnv, exact: ExactBelief | None, n_samples: int, max_frames: int) -> list[Moment]:
    """Play one greedy episode and note at each step what BEN believes.

    :param model: who plays
    :param venv: a single environment whose observations carry the reward
    :param exact: whoever follows the exact posterior
    :param n_samples: number of draws for each density
    :param max_frames: how many steps to take a picture of
    """
    moments: list[Moment] = []
    observation: Any = venv.reset()
    state, done = None, False
    while not done:
        posterior = None if exact is None else exact.after(observation)
        frame = _frame(venv, posterior) if len(moments) < max_frames else None
        seen = normalized(model, observation)
        beliefs = model.bellman_distribution(seen, state, n_samples=n_samples)
        actions, state = model.predict(seen, state, deterministic=True)
        assert state is not None, "a policy always remembers, if only its action"
        if exact is not None:
            exact.act(actions)
        believed = type(beliefs)(*(part[0] for part in beliefs))
        moments.append(Moment(observation, state, believed, _index(model, actions), posterior, frame))
        observation, _, dones, _ = venv.step(actions)
        done = bool(dones[0])
    return moments


def normalized(model: BEN, observation: Any) -> Any:
    """The observation as the agent is used to it, still with its reward."""
    normalize = model.get_vec_normalize_env()
    rewards = previous_reward(observation)
    if normalize is None or rewards is None:
        return observation
    plain = dict(observation) if isinstance(observation, dict) else np.asarray(observation)
    return attach_reward(normalize.normalize_obs(plain), rewards)


def _index(model: BEN, actions: np.ndarray) -> int:
    """Which row of the beliefs an action is: gymnasium lets a discrete space start anywhere."""
    return int(actions[0]) - int(model.policy.action_space.start)


def _frame(venv: VecEnv, posterior: Any) -> np.ndarray | None:
    """A picture of the environment, ``None`` where it draws none: one that cannot render raises if it is asked to."""
    if venv.render_mode is None:
        return None
    arguments = {} if posterior is None else {"belief": posterior}
    picture = venv.env_method("render", **arguments)[0]
    return picture if isinstance(picture, np.ndarray) else None
