"""The best that can be done without a memory: what a baseline that sees (s_t, a_{t-1}, r_{t-1}) and no more can reach.

Its policies are finitely many (an action for each of a handful of inputs), and the tiger problem and the bandit are small enough
to compute the expected return of every one of them.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np

from sb3_ben.envs.bandit import BanditConfig
from sb3_ben.envs.tiger import LISTEN, TigerConfig
from sb3_ben.envs.world import WorldConfig
from sb3_ben.oracles.base import Oracle, OracleState

__all__ = ["BestMemorylessBandit", "BestMemorylessTiger", "Inputs", "bandit_inputs", "best_memoryless", "tiger_inputs"]

ConfigT = TypeVar("ConfigT", bound=WorldConfig)
START = 0  # the input at the beginning of an episode
NO_ACTION = -1
BATCH = 4096  # policies that are evaluated together


class Inputs(NamedTuple):
    """What an agent without memory sees, as a Markov chain for each context that the world may be in.

    :param weights: probability of each of C contexts
    :param transitions: probability of the next input, by context, input and action, ``(C, I, A, I)``
    :param rewards: expected reward, by context, input and action, ``(C, I, A)``
    """

    weights: np.ndarray
    transitions: np.ndarray
    rewards: np.ndarray


def tiger_inputs(config: TigerConfig) -> Inputs:
    """Inputs: the start, s0, s1 and s2 after listening, and for each door gold and the tiger after opening it."""
    transitions, rewards = np.zeros((2, 8, 3, 8)), np.zeros((2, 8, 3))
    for tiger in (0, 1):
        heard = np.array([1 - config.p_correct - config.p_wrong, config.p_wrong, config.p_wrong])
        heard[1 + tiger] = config.p_correct
        transitions[tiger, :, LISTEN, 1:4], rewards[tiger, :, LISTEN] = heard, config.reward_listen
        for door in (0, 1):
            transitions[tiger, :, door, 4 + 2 * door + (door == tiger)] = 1
            rewards[tiger, :, door] = config.reward_tiger if door == tiger else config.reward_gold
    return Inputs(np.full(2, 0.5), transitions, rewards)


def bandit_inputs(config: BanditConfig) -> Inputs:
    """Inputs: the start, and for each arm a loss and a win after pulling it. The returns are polynomials of the arms'
    probabilities, so that the nodes of a Gauss-Legendre quadrature are all the contexts that it takes."""
    nodes, weights = np.polynomial.legendre.leggauss(config.horizon // 2 + 1)
    grids = [np.array(list(product(*[values] * config.n_arms))) for values in ((nodes + 1) / 2, weights / 2)]
    chances, n_inputs = grids[0], 1 + 2 * config.n_arms
    transitions = np.zeros((len(chances), n_inputs, config.n_arms, n_inputs))
    for arm in range(config.n_arms):
        outcomes = np.stack((1 - chances[:, arm], chances[:, arm]), axis=-1)
        transitions[:, :, arm, 1 + 2 * arm : 3 + 2 * arm] = outcomes[:, None]
    rewards = np.broadcast_to(chances[:, None], transitions.shape[:3])
    return Inputs(grids[1].prod(axis=1), transitions, rewards)


def best_memoryless(inputs: Inputs, horizon: int) -> tuple[float, np.ndarray]:
    """The largest expected return of a deterministic policy of the input alone, and its action for each input.

    :param inputs: the chains of inputs
    :param horizon: number of steps
    """
    _, n_inputs, n_actions = inputs.rewards.shape
    policies = np.array(list(product(range(n_actions), repeat=n_inputs)))
    values = np.concatenate([_values(inputs, some, horizon) for some in np.array_split(policies, len(policies) // BATCH + 1)])
    return float(values.max()), policies[values.argmax()]


def _values(inputs: Inputs, policies: np.ndarray, horizon: int) -> np.ndarray:
    """Expected returns of policies ``(P, I)``, by backward recursion."""
    each = np.arange(policies.shape[1])
    rewards = inputs.rewards[:, each, policies].transpose(1, 0, 2)  # (P, C, I)
    transitions = inputs.transitions[:, each, policies].transpose(1, 0, 2, 3)
    values = np.zeros_like(rewards)
    for _ in range(horizon):
        values = rewards + (transitions @ values[..., None])[..., 0]
    return values[..., START] @ inputs.weights


class _BestMemoryless(Oracle[ConfigT]):
    """Acts by the table of :func:`best_memoryless`; all that it keeps is the last action, which a wrapper would show it.

    :param config: the arguments of the environment
    """

    action_entry = 0

    def __init__(self, config: ConfigT) -> None:
        super().__init__(config)
        self.value, self.policy = best_memoryless(self._inputs(), config.horizon)  # type: ignore[attr-defined]

    @abstractmethod
    def _inputs(self) -> Inputs:
        """The chains of inputs of the environment."""

    @abstractmethod
    def _input(self, observations: np.ndarray, rewards: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """The input of each environment after a step, given the action that led there."""

    def _initial_state(self, n_envs: int) -> OracleState:
        return (np.full(n_envs, NO_ACTION),)

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        inputs = np.where(state[0] == NO_ACTION, START, self._input(observations, rewards, state[0]))
        actions = self.policy[inputs]
        return actions, (actions,)


class BestMemorylessTiger(_BestMemoryless[TigerConfig]):
    """The best agent that sees the observation, the last action and its reward, and remembers nothing else: one hearing, then a
    door, then the door with the gold."""

    needs_reward = True

    def _inputs(self) -> Inputs:
        return tiger_inputs(self.config)

    def _input(self, observations: np.ndarray, rewards: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return np.where(actions == LISTEN, 1 + observations, 4 + 2 * actions + (rewards == self.config.reward_tiger))


class BestMemorylessBandit(_BestMemoryless[BanditConfig]):
    """The best agent that sees the last arm and whether it paid, and remembers nothing else: win-stay, lose-shift."""

    def _inputs(self) -> Inputs:
        return bandit_inputs(self.config)

    def _input(self, observations: np.ndarray, rewards: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return 1 + 2 * actions + observations
