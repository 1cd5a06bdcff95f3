"""Simulations: environments drawn from the prior, and an agent that knows how to behave in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_ben.history.previous_reward import VecPreviousReward
from sb3_ben.history.replay import HistoryReplayBuffer
from sb3_ben.history.samples import HistoryReplaySamples, terminal_observations
from sb3_ben.priors.filters import BeliefTracker

__all__ = ["Simulations", "simulate"]


@dataclass
class Simulations:
    """Whole histories from environments drawn from the prior.

    :param make_env: makes a gymnasium environment, or many at once as a ``VecEnv``; each episode is a new draw from the prior
    :param behaviour: who acts: an agent with SB3's ``predict``, or a function that makes one from the ``VecEnv`` (a demonstrator
        may look into it; values learned from one that knows more than the history are confounded by what it knows); ``None`` for
        random actions only
    :param n_steps: number of transitions to simulate
    :param n_envs: number of environments, where ``make_env`` makes single ones
    :param demonstrations: share of the episodes that the behaviour acts in; the others see random actions
    :param epsilon: probability of a random action in the behaviour's episodes; the behaviour must then have a method
        ``with_actions(state, actions)`` by which its memory is told of them, as BEN's policies and our oracles have
    :param fraction: share of simulated histories in the batches of later training
    """

    make_env: Callable[[], gym.Env | VecEnv]
    behaviour: Any = None
    n_steps: int = 10_000
    n_envs: int = 8
    demonstrations: float = 0.75
    epsilon: float = 0.2
    fraction: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.make_env):
            raise ValueError(f"`make_env` of simulations must be a function that makes environments, got {self.make_env!r}")
        for name in ("n_steps", "n_envs"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` of simulations must be at least 1, got {getattr(self, name)}")
        for name in ("demonstrations", "epsilon", "fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"`{name}` of simulations must lie between 0 and 1, got {getattr(self, name)}")

    def venv(self) -> VecPreviousReward:
        """The environments, carrying the previous reward on their observations."""
        env = self.make_env()
        if not isinstance(env, (gym.Env, VecEnv)):
            raise ValueError(f"`make_env` of simulations must make gymnasium environments or a VecEnv, got {env!r}")
        if isinstance(env, VecEnv):
            return env if isinstance(env, VecPreviousReward) else VecPreviousReward(env)
        rest = [cast(Callable[[], gym.Env], self.make_env) for _ in range(self.n_envs - 1)]
        return VecPreviousReward(DummyVecEnv([lambda: env, *rest]))

    def agent(self, venv: VecEnv) -> Any:
        """Who acts in the given environments, ``None`` for nobody."""
        agent = self.behaviour
        if agent is not None and (isinstance(agent, type) or not hasattr(agent, "predict")):
            agent = agent(venv)
            if not hasattr(agent, "predict"):
                raise ValueError(
                    f"`behaviour` of simulations must have SB3's predict() or make something that has, got {agent!r}"
                )
        if agent is not None and self.epsilon > 0 and not hasattr(agent, "with_actions"):
            raise ValueError("`behaviour` of simulations cannot be told of random actions (with_actions()): use epsilon=0")
        return agent


class SimulatedReplayBuffer(HistoryReplayBuffer):
    """Replay of simulated histories, which say that they are."""

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> HistoryReplaySamples:  # type: ignore[override]
        return super().sample(batch_size, env)._replace(n_simulated=batch_size)


def simulate(
    simulations: Simulations, buffer_kwargs: dict[str, Any], tracker: BeliefTracker | None, seed: int
) -> SimulatedReplayBuffer:
    """Fill a buffer of its own with simulated histories; the same seed gives the same histories again.

    :param simulations: what to simulate
    :param buffer_kwargs: observation and action space, device and sequence length of the buffer
    :param tracker: filters to run along, if any
    :param seed: seed of the environments and of the random actions
    """
    venv = simulations.venv()
    for name in ("observation_space", "action_space"):
        if not _alike(getattr(venv, name), buffer_kwargs[name]):
            raise ValueError(f"The simulations have {name} {getattr(venv, name)}, the model has {buffer_kwargs[name]}")
    venv.seed(seed)
    rng = np.random.default_rng(seed)
    n_envs, start = venv.num_envs, int(venv.action_space.start)  # type: ignore[attr-defined]
    n_steps = -(-simulations.n_steps // n_envs)
    belief_dim = 0 if tracker is None else tracker.dim
    buffer = SimulatedReplayBuffer(n_steps * n_envs, n_envs=n_envs, belief_dim=belief_dim, **buffer_kwargs)
    agent = simulations.agent(venv)
    obs, starts = venv.reset(), np.ones(n_envs, dtype=bool)
    state, believed, guided = None, None, np.zeros(n_envs, dtype=bool)
    for _ in range(n_steps):
        guided = np.where(starts, rng.random(n_envs) < simulations.demonstrations, guided)
        actions = start + rng.integers(venv.action_space.n, size=n_envs)  # type: ignore[attr-defined]
        if agent is not None:
            chosen, state = agent.predict(obs, state=state, episode_start=starts, deterministic=True)
            actions = np.where(guided & (rng.random(n_envs) >= simulations.epsilon), chosen, actions)
            state = agent.with_actions(state, actions) if simulations.epsilon else state
        new_obs, rewards, dones, infos = venv.step(actions)
        if not np.isfinite(rewards).all():
            raise ValueError(f"The simulations returned a reward that is not finite: {rewards}")
        successors = terminal_observations(new_obs, dones, infos)  # type: ignore[arg-type]
        if tracker is not None:
            now = tracker.restart(believed, obs, starts)  # type: ignore[arg-type]
            believed = tracker.advance(now.state, successors, actions - start, rewards)
            buffer.add_beliefs(now.features, believed.features)
        buffer.add(obs, successors, actions, rewards, dones, infos)  # type: ignore[arg-type]
        obs, starts = new_obs, np.array(dones, dtype=bool)
    venv.close()
    return buffer


def _alike(one: spaces.Space, other: spaces.Space) -> bool:
    """Whether two spaces have the same form; bounds may differ, as in simulations of related problems."""
    if isinstance(one, spaces.Dict) and isinstance(other, spaces.Dict):
        return set(one.spaces) == set(other.spaces) and all(_alike(one[key], other[key]) for key in one.spaces)
    if isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        return one.shape == other.shape and one.dtype == other.dtype
    return one == other
