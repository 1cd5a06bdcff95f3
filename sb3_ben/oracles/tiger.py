"""Exact answers for the tiger problem, by dynamic programming over the belief.

Listening is the same coin whatever the agent has done before, so a belief is a prior plus the number of times the tiger was heard
behind door 1 minus the times it was heard behind door 2: a line of beliefs, on which every value is one backward recursion away.
Opening a door ends all doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sb3_ben.envs.tiger import LISTEN, OPEN_1, OPEN_2, TigerConfig
from sb3_ben.envs.world import require
from sb3_ben.oracles.base import Oracle, OracleState

__all__ = [
    "AlwaysListen",
    "ArgMaxQMDP",
    "BayesOptimal",
    "PosteriorSampling",
    "TigerValues",
    "action_values",
    "bayes_optimal_values",
    "belief_after",
    "posterior_sampling_value",
    "qmdp_values",
]

CERTAIN = 1e-15  # beliefs this close to certainty are not told apart
CONVERGED = 1e-12  # weight of the future at which a discounted recursion is cut off
UNKNOWN = -1

#: chooses actions from the action values ``(..., 3)`` and the beliefs ``(...)``
Decision = Callable[[np.ndarray, np.ndarray], np.ndarray]


class TigerValues(NamedTuple):
    """Values on the line of beliefs that listening can reach from a prior.

    :param beliefs: P(tiger behind door 1) after net ``-D .. D`` hearings of door 1
    :param action_values: by number of steps left (one step left first; a single entry for an infinite horizon), belief, action
    :param actions: the action that the evaluated policy takes there
    """

    beliefs: np.ndarray
    action_values: np.ndarray
    actions: np.ndarray

    @property
    def value(self) -> float:
        """The value of the prior with all steps left: J of the evaluated policy."""
        centre = len(self.beliefs) // 2
        return float(self.action_values[-1, centre, self.actions[-1, centre]])


def belief_after(config: TigerConfig, net: ArrayLike, prior: float = 0.5) -> np.ndarray:
    """P(tiger behind door 1) after ``net`` more hearings of door 1 than of door 2."""
    require(0 <= prior <= 1, "prior", f"must be a probability, got {prior}")
    net = np.asarray(net, dtype=float)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        log_ratio = np.where(net == 0, 0.0, net * (np.log(config.p_correct) - np.log(config.p_wrong)))
        log_ratio = np.where(config.p_correct == config.p_wrong, 0.0, log_ratio)
        return 1 / (1 + np.exp(np.log1p(-prior) - np.log(prior) - log_ratio))


def _line_of_beliefs(config: TigerConfig, n_steps: int, prior: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        evidence = abs(np.log(config.p_correct) - np.log(config.p_wrong)) if config.p_correct != config.p_wrong else np.inf
    reach = min(n_steps, max(1, int(np.ceil(-2 * np.log(CERTAIN) / evidence))))
    return belief_after(config, np.arange(-reach, reach + 1), prior)


def _known_action(config: TigerConfig) -> tuple[int, float]:
    """What is best once the truth is known: an action of the case "tiger behind door 1", and its reward."""
    rewards = [config.reward_tiger, config.reward_gold, config.reward_listen]
    best = int(np.argmax(rewards))
    return best, rewards[best]


def _one_step(
    config: TigerConfig, beliefs: np.ndarray, values: np.ndarray, known: float | np.ndarray, discount: float
) -> np.ndarray:
    """Action values of beliefs, given next step's values of beliefs and of having opened a door."""
    open_1 = beliefs * config.reward_tiger + (1 - beliefs) * config.reward_gold + discount * known
    open_2 = (1 - beliefs) * config.reward_tiger + beliefs * config.reward_gold + discount * known
    hear_1 = beliefs * config.p_correct + (1 - beliefs) * config.p_wrong
    hear_2 = (1 - beliefs) * config.p_correct + beliefs * config.p_wrong
    padded = np.concatenate((values[:1], values, values[-1:]))
    heard = hear_1 * padded[2:] + hear_2 * padded[:-2] + (1 - hear_1 - hear_2) * values
    return np.stack((open_1, open_2, config.reward_listen + discount * heard), axis=-1)


def _check_problem(discount: float, horizon: int | None) -> None:
    require(0 <= discount <= 1, "discount", f"must lie in [0, 1], got {discount}")
    require(horizon is not None or discount < 1, "discount", "must be below 1 for an infinite horizon")
    is_count = horizon is None or (isinstance(horizon, (int, np.integer)) and horizon >= 1)
    require(is_count, "horizon", f"must be an integer of at least 1, or None, got {horizon!r}")


def _solve(
    config: TigerConfig, decide: Decision, discount: float, horizon: int | None, prior: float, reveals: bool = True
) -> TigerValues:
    """Evaluate a policy by backward recursion, exactly for a finite horizon, to machine precision for an infinite one."""
    _check_problem(discount, horizon)
    n_steps = horizon or (int(np.ceil(np.log(CONVERGED) / np.log(discount))) if discount > 0 else 1)
    beliefs = _line_of_beliefs(config, n_steps, prior)
    values, known = np.zeros_like(beliefs), 0.0
    tables: list[np.ndarray] = []
    for _ in range(n_steps):
        table = _one_step(config, beliefs, values, known if reveals else values, discount)
        values = np.take_along_axis(table, decide(table, beliefs)[:, None], axis=-1)[:, 0]
        known = _known_action(config)[1] + discount * known
        tables = [*tables, table] if horizon else [table]
    action_values = np.stack(tables)
    return TigerValues(beliefs, action_values, np.stack([decide(table, beliefs) for table in action_values]))


def _greedy(table: np.ndarray, beliefs: np.ndarray) -> np.ndarray:
    return table.argmax(axis=-1)


def bayes_optimal_values(
    config: TigerConfig, discount: float = 0.9, horizon: int | None = None, prior: float = 0.5, reveals: bool = True
) -> TigerValues:
    """Bayes-optimal action values; ``.value`` is J*.

    :param config: the arguments of the environment
    :param discount: discount factor
    :param horizon: number of steps, ``None`` for infinitely many
    :param prior: P(tiger behind door 1) at the start
    :param reveals: whether the agent sees the reward of opening a door, and with it where the tiger is
    """
    return _solve(config, _greedy, discount, horizon, prior, reveals)


def qmdp_values(config: TigerConfig, discount: float = 0.9, horizon: int | None = None, prior: float = 0.5) -> TigerValues:
    """The values of arg-max QMDP: in each belief, the action whose optimal value in the known MDPs is best on average."""

    def decide(table: np.ndarray, beliefs: np.ndarray) -> np.ndarray:
        # once the truth is known all actions have the same future, so only the expected reward of this step counts
        return _one_step(config, beliefs, np.zeros_like(beliefs), 0.0, 0.0).argmax(axis=-1)

    return _solve(config, decide, discount, horizon, prior)


def posterior_sampling_value(config: TigerConfig, discount: float = 0.9, horizon: int | None = None) -> float:
    """The value of :class:`PosteriorSampling`: it opens a door at random, or listens for ever where that pays best."""
    _check_problem(discount, horizon)
    known_action, known_reward = _known_action(config)
    blind = config.reward_listen if known_action == LISTEN else (config.reward_tiger + config.reward_gold) / 2
    n_steps = np.inf if horizon is None else horizon
    rest = n_steps - 1 if discount == 1 else discount * (1 - discount ** (n_steps - 1)) / (1 - discount)
    return float(blind + known_reward * rest)


def action_values(config: TigerConfig, belief: ArrayLike, discount: float = 0.9, horizon: int | None = None) -> np.ndarray:
    """Bayes-optimal values of opening door 1, opening door 2 and listening, for beliefs P(tiger behind door 1) of any shape."""
    beliefs = np.asarray(belief, dtype=float)
    rows = [bayes_optimal_values(config, discount, horizon, prior=p) for p in beliefs.ravel()]
    values = np.array([row.action_values[-1, len(row.beliefs) // 2] for row in rows])
    return values.reshape(*beliefs.shape, 3)


class _TigerOracle(Oracle[TigerConfig]):
    """Remembers net hearings of door 1, the tiger's door once it has been seen, the steps taken and the previous action."""

    needs_reward = True
    action_entry = 3

    def __init__(self, config: TigerConfig | None = None, seed: int | None = None) -> None:
        super().__init__(config or TigerConfig(), seed)

    def beliefs(self, state: OracleState) -> np.ndarray:
        """P(tiger behind door 1) of each environment."""
        net, tiger = state[:2]
        return np.where(tiger == UNKNOWN, belief_after(self.config, net), tiger == 0)

    def _initial_state(self, n_envs: int) -> OracleState:
        zeros = np.zeros(n_envs, dtype=np.int64)
        return zeros, zeros + UNKNOWN, zeros, zeros + UNKNOWN

    def _remember(self, observations: np.ndarray, rewards: np.ndarray, state: OracleState) -> tuple[np.ndarray, np.ndarray]:
        """Net hearings and the tiger's door after what has just been seen."""
        net, tiger, _, previous = state[:4]
        heard = (observations == 1).astype(np.int64) - (observations == 2)
        net = net + np.where(previous == LISTEN, heard, 0)
        met_tiger = abs(rewards - self.config.reward_tiger) < abs(rewards - self.config.reward_gold)
        tells = ~np.isnan(rewards) & (self.config.reward_tiger != self.config.reward_gold)
        told = np.isin(previous, (OPEN_1, OPEN_2)) & tells
        return net, np.where(told, np.where(met_tiger, previous, 1 - previous), tiger)

    def _act_on(self, tiger: np.ndarray) -> np.ndarray:
        """The best action where the tiger's door is known."""
        best = _known_action(self.config)[0]
        return np.full_like(tiger, LISTEN) if best == LISTEN else np.where(best == OPEN_1, tiger, 1 - tiger)


class _TableOracle(_TigerOracle):
    """Acts by the actions of :class:`TigerValues` until the tiger has been seen; by others where rewards cannot be seen."""

    values: TigerValues
    unrewarded: TigerValues

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        net, tiger = self._remember(observations, rewards, state)
        steps = state[2]
        unsure = np.where(np.isnan(rewards), self._look_up(self.unrewarded, net, steps), self._look_up(self.values, net, steps))
        actions = np.where(tiger == UNKNOWN, unsure, self._act_on(tiger))
        return actions, (net, tiger, steps + 1, actions)

    @staticmethod
    def _look_up(values: TigerValues, net: np.ndarray, steps: np.ndarray) -> np.ndarray:
        reach = values.actions.shape[1] // 2
        left = np.clip(len(values.actions) - 1 - steps, 0, None)
        return values.actions[left, np.clip(net, -reach, reach) + reach]


class BayesOptimal(_TableOracle):
    """The Bayes-optimal policy.

    :param config: the arguments of the environment
    :param values: the solution to act by; by default that of the undiscounted return of one episode
    """

    def __init__(self, config: TigerConfig | None = None, values: TigerValues | None = None) -> None:
        super().__init__(config)
        horizon = self.config.horizon
        self.values = values or bayes_optimal_values(self.config, discount=1.0, horizon=horizon)
        self.unrewarded = bayes_optimal_values(self.config, discount=1.0, horizon=horizon, reveals=False)


class ArgMaxQMDP(_TableOracle):
    """Acts by the mean over the belief of the optimal values of the known MDPs: to it, information is worth nothing.

    :param config: the arguments of the environment
    """

    def __init__(self, config: TigerConfig | None = None) -> None:
        super().__init__(config)
        self.values = self.unrewarded = qmdp_values(self.config, discount=1.0, horizon=self.config.horizon)


class PosteriorSampling(_TigerOracle):
    """Believes in one hypothesis per episode, drawn from the prior, until the tiger has been seen.

    :param config: the arguments of the environment
    :param seed: seed of the hypotheses
    """

    def _initial_state(self, n_envs: int) -> OracleState:
        return (*super()._initial_state(n_envs), self.rng.integers(2, size=n_envs))

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        net, tiger = self._remember(observations, rewards, state)
        hypothesis = state[4]
        actions = self._act_on(np.where(tiger == UNKNOWN, hypothesis, tiger))
        return actions, (net, tiger, state[2] + 1, actions, hypothesis)


class AlwaysListen(_TigerOracle):
    """Never opens a door.

    :param config: the arguments of the environment
    """

    needs_reward = False

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        net, tiger = self._remember(observations, rewards, state)
        actions = np.full_like(net, LISTEN)
        return actions, (net, tiger, state[2] + 1, actions)
