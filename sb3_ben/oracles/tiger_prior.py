"""What is known about the tiger problem before the first step, as parts of a :class:`~sb3_ben.priors.Prior`."""

from __future__ import annotations

import numpy as np

from sb3_ben.envs.tiger import LISTEN, OPEN_1, OPEN_2, TigerConfig
from sb3_ben.oracles.tiger import UNKNOWN, belief_after
from sb3_ben.priors import BeliefState, Outcomes

__all__ = ["TigerBelief", "TigerModel"]


class TigerBelief:
    """The exact posterior of the tiger problem: the probabilities that the tiger is behind door 1 and behind door 2.

    :param config: the arguments of the environment
    """

    size = 2

    def __init__(self, config: TigerConfig | None = None) -> None:
        self.config = config or TigerConfig()

    def initial(self, n_envs: int) -> BeliefState:
        """Net hearings of door 1, and the tiger's door once it has been seen."""
        return np.zeros(n_envs, dtype=np.int64), np.full(n_envs, UNKNOWN)

    def update(
        self, state: BeliefState, observations: np.ndarray, previous_actions: np.ndarray, previous_rewards: np.ndarray
    ) -> BeliefState:
        net, tiger = state
        heard = (observations == 1).astype(np.int64) - (observations == 2)
        net = net + np.where(previous_actions == LISTEN, heard, 0)
        met_tiger = abs(previous_rewards - self.config.reward_tiger) < abs(previous_rewards - self.config.reward_gold)
        tells = np.isfinite(previous_rewards) & (self.config.reward_tiger != self.config.reward_gold)
        told = np.isin(previous_actions, (OPEN_1, OPEN_2)) & tells
        return net, np.where(told, np.where(met_tiger, previous_actions, 1 - previous_actions), tiger)

    def features(self, state: BeliefState) -> np.ndarray:
        net, tiger = state
        first = np.where(tiger == UNKNOWN, belief_after(self.config, net), tiger == 0)
        return np.stack((first, 1 - first), axis=1)


class TigerModel(TigerBelief):
    """The tiger problem as an exact model: the posterior over the tiger's door, and what each action does given the door.

    An action has at most three outcomes: listening moves to s0, s1 or s2; opening a door pays the tiger's or the gold's reward.
    """

    def outcomes(self, observations: np.ndarray, actions: np.ndarray) -> Outcomes:
        config, n = self.config, len(actions)
        listens = (actions == LISTEN)[:, None]
        silent = max(1 - config.p_correct - config.p_wrong, 0.0)
        heard = np.array([[silent, config.p_correct, config.p_wrong], [silent, config.p_wrong, config.p_correct]])
        opened = np.zeros((n, 2, 3))  # tiger, gold, never
        for context in range(2):
            meets = actions == context
            opened[:, context, 0], opened[:, context, 1] = meets, ~meets
        pays = np.array([config.reward_tiger, config.reward_gold, 0.0])
        return Outcomes(
            probabilities=np.where(listens[..., None], heard, opened),
            rewards=np.where(listens, config.reward_listen, pays),
            observations=np.where(listens, np.arange(3), 0),
            dones=np.zeros((n, 3), dtype=bool),
        )
