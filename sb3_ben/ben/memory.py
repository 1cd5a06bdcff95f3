"""What an agent remembers between two steps, and what it makes of it: the part of the policy that moves along episodes."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_ben.flows.units import RunningStandardizer
from sb3_ben.history.cells import Hidden, select_rows
from sb3_ben.history.encoder import HistoryQNetwork, RandomEncoder
from sb3_ben.history.previous_reward import previous_reward
from sb3_ben.history.samples import NO_ACTION, Observed, map_observations
from sb3_ben.priors import Belief, BellmanModel
from sb3_ben.priors.filters import BeliefTracker, Believed

__all__ = ["Encoding", "Memory", "Recalled", "RecurrentState", "RememberingPolicy"]

#: the memory in the form in which callers carry it: arrays, the previous actions last
RecurrentState = tuple[np.ndarray, ...]


class Encoding(NamedTuple):
    """Encoded histories.

    :param latent: learned encoding h_t, ``(..., latent_dim)``
    :param q_values: standardised values of all actions, ``(..., n_actions)``
    :param features: fixed random features of the history, of any size, ``(..., size)``
    """

    latent: th.Tensor
    q_values: th.Tensor
    features: th.Tensor

    def map(self, function: Callable[[th.Tensor], th.Tensor]) -> Encoding:
        """The same done to each part."""
        return Encoding(*map(function, self))


class Memory(NamedTuple):
    """What the agent remembers between two steps of ``n`` episodes.

    :param hidden: state of the Q-network's recurrent layer, then that of the random encoder, then that of the user's filters
    :param actions: previous actions, -1 where an episode begins, ``(n,)``
    """

    hidden: Hidden
    actions: th.Tensor


class Recalled(NamedTuple):
    """What becomes of observations that a memory has seen.

    :param encoding: encoded histories
    :param hidden: what there is to remember of them
    :param is_batch: whether there were many observations, and not a single one
    """

    encoding: Encoding
    hidden: Hidden
    is_batch: bool = True


class RememberingPolicy(BasePolicy, abc.ABC):
    """SB3's ``predict`` for networks that read histories."""

    action_space: spaces.Discrete
    q_net: HistoryQNetwork
    random_encoder: RandomEncoder
    reward_units: RunningStandardizer
    tracker: BeliefTracker | None
    _warned = False  # that observations carry no reward

    @property
    @abc.abstractmethod
    def acting_net(self) -> HistoryQNetwork:
        """The Q-network whose greedy actions are those of ``predict``."""

    @abc.abstractmethod
    def encode(self, observed: Observed, hidden: Hidden | None = None, net: HistoryQNetwork | None = None) -> Recalled:
        """One recurrent pass over a batch of histories.

        :param observed: histories, with rewards in the environment's units
        :param hidden: what was remembered before
        :param net: the Q-network, by default the one that learns
        """

    @staticmethod
    def make_tracker(
        belief: Belief | None, bellman_model: BellmanModel | None, action_space: spaces.Discrete
    ) -> BeliefTracker | None:
        """What runs the user's filters; a belief's state is needed in replay where an exact model imagines other outcomes."""
        filters = [one for one in (belief, bellman_model) if one is not None]
        return BeliefTracker(filters, len(filters) == 2, int(action_space.n)) if filters else None

    def _initial_hidden(self, n_envs: int) -> Hidden:
        """The state of both networks at the start of episodes."""
        return (*self.q_net.initial_hidden(n_envs), *self.random_encoder.initial_hidden(n_envs))

    @property
    def _n_hidden(self) -> int:
        """Number of tensors that both networks remember; what follows them belongs to filters."""
        return self.q_net.cell.n_parts + 1

    def initial_memory(self, n_envs: int) -> Memory:
        """The memory of episodes that have just begun."""
        no_actions = th.full((n_envs,), NO_ACTION, dtype=th.long, device=self.device)
        beliefs = () if self.tracker is None else self.tracker.initial(n_envs)
        return Memory((*self._initial_hidden(n_envs), *(th.as_tensor(part, device=self.device) for part in beliefs)), no_actions)

    def step(
        self,
        obs: PyTorchObs,
        memory: Memory,
        rewards: th.Tensor,
        starts: th.Tensor | None,
        believed: Believed | None = None,
        net: HistoryQNetwork | None = None,
    ) -> Recalled:
        """Advance the memory by one observation of ``n`` episodes.

        :param obs: observations ``(n, ...)``
        :param memory: the memory after the last step
        :param rewards: previous rewards ``(n,)``, in the environment's units; NaN, for filters to see, where they are not known
        :param starts: which episodes begin with this observation ``(n,)``, ``None`` for none of them
        :param believed: what the user's filters say after this observation, where that is already known
        :param net: the Q-network, by default the one that learns
        """
        hidden, actions = memory.hidden[: self._n_hidden], memory.actions
        if starts is not None:
            actions = actions.masked_fill(starts, NO_ACTION)
            hidden = select_rows(starts, self._initial_hidden(len(starts)), hidden)
        beliefs, state = None, cast(Hidden, ())
        if self.tracker is not None:
            believed = believed or self._believe(self.tracker, obs, memory.hidden[self._n_hidden :], actions, rewards, starts)
            beliefs = th.as_tensor(believed.features, device=actions.device)[None]
            state = tuple(th.as_tensor(part, device=actions.device) for part in believed.state)
            rewards = th.where(rewards.isnan(), self.reward_units.mean, rewards)
        obs = map_observations(lambda part: part[None], obs)
        one_step = self.encode(Observed(obs, actions[None], rewards[None], beliefs), hidden, net)
        return Recalled(one_step.encoding.map(lambda part: part[0]), (*one_step.hidden, *state))

    @staticmethod
    def _believe(
        tracker: BeliefTracker,
        obs: PyTorchObs,
        hidden: Hidden,
        actions: th.Tensor,
        rewards: th.Tensor,
        starts: th.Tensor | None,
    ) -> Believed:
        """What the user's filters say after an observation."""
        state = tuple(part.cpu().numpy() for part in hidden)
        if starts is not None:
            state = tracker.reset(state, starts.cpu().numpy())
        arrays = map_observations(lambda part: part.cpu().numpy(), obs)
        return tracker.advance(state, arrays, actions.cpu().numpy(), rewards.cpu().numpy())

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: RecurrentState | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, RecurrentState | None]:
        """Greedy actions and the memory to pass to the next call; see :meth:`sb3_ben.BEN.predict`."""
        recalled = self.recall(observation, state, episode_start, self.acting_net)
        actions = recalled.encoding.q_values.argmax(dim=-1).cpu().numpy() + int(self.action_space.start)
        return (actions if recalled.is_batch else actions.squeeze(axis=0)), self.remember(recalled.hidden, actions)

    @th.no_grad()
    def recall(
        self,
        observation: Any,
        state: RecurrentState | None,
        episode_start: np.ndarray | None,
        net: HistoryQNetwork | None = None,
        believed: Believed | None = None,
    ) -> Recalled:
        """What training, ``predict`` and its relatives share: from numpy to encoded histories and memory.

        :param observation: one observation or a batch, carrying the previous rewards
        :param state: what was remembered after the last step
        :param episode_start: which environments have begun a new episode
        :param net: the Q-network, by default the one that ``predict`` goes by
        :param believed: what the user's filters say after this observation, where that is already known
        """
        if self.training:
            self.set_training_mode(False)
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
            raise ValueError(
                "predict() got a tuple instead of an observation. You are probably mixing Gym API with SB3 VecEnv API: "
                "`obs, info = env.reset()` (Gym) vs `obs = vec_env.reset()` (SB3 VecEnv)."
            )
        obs, is_batch = self.obs_to_tensor(observation)
        n_envs = len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)
        memory = self.initial_memory(n_envs) if state is None else self.memory_from(state, n_envs)
        starts = np.zeros(n_envs, dtype=bool) if episode_start is None else np.asarray(episode_start, dtype=bool).reshape(n_envs)
        rewards = self.rewards_of(observation, n_envs, is_first=state is None or bool(starts.all()))
        begins = th.as_tensor(starts, device=rewards.device) if starts.any() else None
        return self.step(obs, memory, rewards, begins, believed, net or self.acting_net)._replace(is_batch=is_batch)

    def rewards_of(self, observation: Any, n_envs: int, is_first: bool) -> th.Tensor:
        """The previous rewards carried by the observation; where there are none, the mean reward seen in training."""
        rewards = previous_reward(observation)
        if rewards is not None and len(rewards) == n_envs:
            return th.as_tensor(rewards, dtype=th.float32, device=self.device)
        reads = self.q_net.has_memory or self.tracker is not None
        if reads and not is_first and not self._warned and self.reward_units.var > 0 < self.reward_units.count:
            self._warned = True
            warnings.warn(
                "These observations carry no previous reward, which this agent reads: its mean is used instead. Use "
                "sb3_ben.evaluate_policy, or wrap the environment in sb3_ben.VecPreviousReward, for exact predictions.",
                stacklevel=4,
            )
        # a filter has its own way with what is not known
        return self.reward_units.mean.expand(n_envs) if self.tracker is None else th.full((n_envs,), th.nan, device=self.device)

    def memory_from(self, state: RecurrentState, n_envs: int) -> Memory:
        """The memory in the form in which the networks use it."""
        hidden, actions = state[:-1], state[-1]
        if len(actions) != n_envs:
            raise ValueError(f"`state` remembers {len(actions)} environments, but {n_envs} observations were given")
        device = self.device
        tensors = tuple(th.as_tensor(part, device=device) for part in hidden)
        return Memory(tensors, th.as_tensor(actions, dtype=th.long, device=device) - int(self.action_space.start))

    @staticmethod
    def remember(hidden: Hidden, actions: np.ndarray) -> RecurrentState:
        """The memory in the form in which callers carry it: arrays, the previous actions last."""
        return (*(part.cpu().numpy() for part in hidden), np.asarray(actions))

    def repeat(self, state: RecurrentState, n: int) -> RecurrentState:
        """The memory of one episode, n times."""
        hidden, beliefs = state[: self._n_hidden], state[self._n_hidden : -1]
        return (*(np.repeat(part, n, axis=1) for part in hidden), *(np.repeat(part, n, axis=0) for part in (*beliefs, state[-1])))

    @staticmethod
    def with_actions(state: RecurrentState | None, actions: np.ndarray) -> RecurrentState | None:
        """The memory of having executed other actions than the predicted ones."""
        return None if state is None else (*state[:-1], np.atleast_1d(actions))

    def forward(self, obs: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        return self._predict(obs, deterministic)

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        """Greedy actions at the beginning of an episode."""
        if self.tracker is None:
            return self.acting_net._predict(observation, deterministic)
        n_envs = len(next(iter(observation.values())) if isinstance(observation, dict) else observation)
        nothing = th.zeros(n_envs, device=self.device)
        first = self.step(observation, self.initial_memory(n_envs), nothing, None, net=self.acting_net)
        return first.encoding.q_values.argmax(dim=-1) + int(self.action_space.start)
