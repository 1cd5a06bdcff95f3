"""Exact answers for the Bernoulli bandit: the Bayes-optimal value, the agent that attains it, and classics to compare it with.

Under the uniform prior, an arm with ``w`` wins and ``l`` losses has the posterior Beta(w + 1, l + 1). All that matters of a
history is therefore its counts, an array ``(..., n_arms, 2)`` of the wins and losses of every arm.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from math import comb

import numpy as np

from sb3_ben.envs.bandit import BanditConfig
from sb3_ben.envs.world import require
from sb3_ben.oracles.base import Oracle, OracleState

__all__ = [
    "BanditOracle",
    "BayesOptimal",
    "Gittins",
    "Greedy",
    "RandomArm",
    "Thompson",
    "bayes_optimal_value",
    "gittins_index",
    "policy_value",
    "posterior_mean",
    "probability_of_best",
]

WINS, LOSSES = range(2)
NO_ARM = -1
MAX_STATES = 10**7  # about ten seconds and a gigabyte


def posterior_mean(counts: np.ndarray) -> np.ndarray:
    """Probability that the next pull of each arm wins."""
    return (counts[..., WINS] + 1) / (counts.sum(axis=-1) + 2)


def _check_discount(discount: float) -> None:
    require(0 <= discount <= 1, "discount", f"must lie in [0, 1], got {discount}")


class _Lattice:
    """All counts that can arise before the last pull, numbered so that one table of successors serves every time step.

    The counts after ``t`` pulls are the ways to write ``t`` as an ordered sum of ``2 * n_arms`` parts. All parts but the last are
    listed by their partial sums, the longest sum being the slowest to change. Then the counts after ``t`` pulls are the head of
    the list of the whole horizon, and a loss of the last arm, which adds to the part left out, stays on its row.
    """

    def __init__(self, config: BanditConfig) -> None:
        self.n_parts = 2 * config.n_arms
        self.horizon = config.horizon
        n_states = comb(self.horizon - 1 + self.n_parts, self.n_parts)
        too_long = f"{self.horizon} is too long for an exact answer with {config.n_arms} arms"
        require(n_states <= MAX_STATES, "horizon", f"{too_long}: it takes 10^{len(str(n_states)) - 1} counts, the limit is 10^7")
        # below[j, s]: in how many ways j + 1 parts sum to less than s
        below = [np.arange(self.horizon + 1)]
        for _ in range(self.n_parts - 2):
            below.append(below[-1].cumsum())
        self._below = np.stack(below)
        self._sums = self._enumerate()
        one_more = np.tri(self.n_parts - 1, dtype=np.int64).T  # one more in part j adds to the partial sums from j on
        self._successors = [*(self._row(self._sums + more) for more in one_more), np.arange(len(self._sums))]

    def _enumerate(self) -> np.ndarray:
        totals = np.arange(self.horizon)
        sums = totals[:, None]
        for _ in range(self.n_parts - 2):
            ends = np.searchsorted(sums[:, -1], totals, side="right")
            sums = np.concatenate([np.insert(sums[:end], sums.shape[1], total, axis=1) for total, end in enumerate(ends)])
        return sums

    def _row(self, sums: np.ndarray) -> np.ndarray:
        return self._below[np.arange(self.n_parts - 1), sums].sum(axis=-1)

    def row(self, counts: np.ndarray) -> np.ndarray:
        """Where counts stand in the list."""
        return self._row(counts.reshape(len(counts), self.n_parts).cumsum(axis=1)[:, :-1])

    def counts(self, time: int) -> np.ndarray:
        """All counts after ``time`` pulls, in the order of the list; shape ``(n, n_arms, 2)``."""
        sums = self._sums[: self._below[-1, time + 1]]
        return np.diff(sums, axis=1, prepend=0, append=time).reshape(len(sums), -1, 2)

    def action_values(self, time: int, next_values: np.ndarray, discount: float) -> np.ndarray:
        """Value of each arm in each of ``counts(time)``, given the values of all counts one pull later."""
        means = posterior_mean(self.counts(time))
        after_win, after_loss = (
            np.stack([discount * next_values[rows[: len(means)]] for rows in self._successors[outcome::2]], axis=1)
            for outcome in (WINS, LOSSES)
        )
        return means * (1 + after_win) + (1 - means) * after_loss

    def after_horizon(self) -> np.ndarray:
        """The values of all counts when nothing is left to win."""
        return np.zeros(comb(self.horizon + self.n_parts - 1, self.n_parts - 1))


def _solve(lattice: _Lattice, discount: float) -> tuple[float, list[np.ndarray]]:
    """The Bayes-optimal value, and a best arm for all counts of every time step."""
    _check_discount(discount)
    values, best_arms = lattice.after_horizon(), []
    for time in reversed(range(lattice.horizon)):
        action_values = lattice.action_values(time, values, discount)
        values = action_values.max(axis=1)
        best_arms.append(action_values.argmax(axis=1).astype(np.int16))
    return values.item(), best_arms[::-1]


def bayes_optimal_value(config: BanditConfig, discount: float = 1.0) -> float:
    """The largest expected return that any agent can have, by dynamic programming over all counts.

    :param config: the arguments of the environment
    :param discount: discount factor
    """
    return _solve(_Lattice(config), discount)[0]


def policy_value(oracle: BanditOracle, discount: float = 1.0) -> float:
    """The exact expected return of an oracle, by the same recursion as :func:`bayes_optimal_value`.

    :param oracle: the oracle, whose arguments say of which environment
    :param discount: discount factor of the return, whatever the oracle itself plans with
    """
    _check_discount(discount)
    lattice = _Lattice(oracle.config)
    values = lattice.after_horizon()
    for time in reversed(range(lattice.horizon)):
        probabilities = oracle.distribution(lattice.counts(time))
        values = (probabilities * lattice.action_values(time, values, discount)).sum(axis=1)
    return values.item()


def gittins_index(counts: np.ndarray, remaining: int, discount: float = 1.0) -> np.ndarray:
    """The finite-horizon Gittins index: the best ratio of expected wins to expected pulls, both discounted, of all rules to play
    an arm at least once and at most ``remaining`` times. As ``remaining`` grows it tends to the index of Gittins (1979).

    The rule that is best when every pull has a price wins at a ratio which is, in turn, a better price (Dinkelbach, 1967). Prices
    climb from the posterior mean, the ratio of a single pull, to the index in a few rounds, for there are finitely many rules.

    :param counts: wins and losses of each arm, shape ``(..., 2)``
    :param remaining: number of pulls that are left
    :param discount: discount factor
    :return: the index of each arm, shape ``(...)``
    """
    require(remaining >= 1, "remaining", f"must be at least 1, got {remaining}")
    _check_discount(discount)
    price = posterior_mean(counts)
    while True:
        better = _best_ratio(counts, remaining, discount, price)
        if np.all(better <= price + 1e-14):
            return price
        price = better


def _best_ratio(counts: np.ndarray, remaining: int, discount: float, price: np.ndarray) -> np.ndarray:
    """Wins per pull of the rule that is best when a pull costs ``price``, by recursion over the number of wins to come."""
    wins = pulls = np.zeros((*price.shape, remaining + 1))
    for time in reversed(range(remaining)):
        means = (counts[..., WINS, None] + np.arange(time + 1) + 1) / (counts.sum(axis=-1)[..., None] + time + 2)
        wins = means + discount * (means * wins[..., 1:] + (1 - means) * wins[..., :-1])
        pulls = 1 + discount * (means * pulls[..., 1:] + (1 - means) * pulls[..., :-1])
        if time:
            worthwhile = wins > price[..., None] * pulls
            wins, pulls = wins * worthwhile, pulls * worthwhile
    return (wins / pulls)[..., 0]


@lru_cache(maxsize=1024)
def _index_table(max_pulls: int, remaining: int, discount: float) -> np.ndarray:
    """The index by wins and losses, for all arms with at most ``max_pulls`` pulls."""
    wins, losses = np.indices((max_pulls + 1, max_pulls + 1))
    reachable = wins + losses <= max_pulls
    table = np.full(wins.shape, np.nan)
    table[reachable] = gittins_index(np.stack((wins[reachable], losses[reachable]), axis=-1), remaining, discount)
    return table


def probability_of_best(counts: np.ndarray) -> np.ndarray:
    """Posterior probability that each arm is the best one.

    It is the integral of the arm's density times the distribution functions of the others: a polynomial, so that Gauss-Legendre
    quadrature is exact.

    :param counts: wins and losses of each arm, shape ``(n, n_arms, 2)``
    """
    most_pulls, n_arms = int(counts.sum(axis=(1, 2)).max()), counts.shape[1]
    nodes, weights = np.polynomial.legendre.leggauss((most_pulls + n_arms + 1) // 2)
    x, weights = (nodes + 1) / 2, weights / 2
    density, distribution = (table[counts[..., WINS], counts[..., LOSSES]] for table in _beta_tables(most_pulls, x))
    below = np.ones_like(density)
    for arm in range(n_arms):
        below[:, np.arange(n_arms) != arm] *= distribution[:, arm, None]
    return (density * below) @ weights


def _beta_tables(most: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Density and distribution function of Beta(w + 1, l + 1) at ``x``, by ``w`` and ``l`` up to ``most``."""
    wins, losses = np.indices((most + 1, most + 1))[..., None]
    factorials = np.concatenate(([0.0], np.log(np.arange(1, 2 * most + 1)).cumsum()))
    log_chances = factorials[wins + losses] - factorials[wins] - factorials[losses] + wins * np.log(x) + losses * np.log1p(-x)
    chances = np.exp(log_chances)  # of w wins and l losses in w + l pulls of an arm that wins with probability x
    return (wins + losses + 1) * chances, x * chances.cumsum(axis=1)


class BanditOracle(Oracle[BanditConfig]):
    """Pulls arms by the counts, which it keeps in its state together with the arm pulled last.

    The observation is the reward of that pull, so no reward has to come with it.

    :param config: the arguments of the environment
    :param seed: seed of the oracle's own draws, for those that draw; they do so whether ``deterministic`` or not
    """

    action_entry = 1

    def __init__(self, config: BanditConfig | None = None, seed: int | None = None) -> None:
        super().__init__(config or BanditConfig(), seed)

    @abstractmethod
    def distribution(self, counts: np.ndarray) -> np.ndarray:
        """The probability to pull each arm, shape ``(n, n_arms)``.

        :param counts: wins and losses of each arm, shape ``(n, n_arms, 2)``
        """

    @abstractmethod
    def _choose(self, counts: np.ndarray) -> np.ndarray:
        """An arm for each row of counts, with the probabilities of :meth:`distribution`."""

    def beliefs(self, state: OracleState) -> np.ndarray:
        """The two parameters of the Beta posterior of every arm, shape ``(n_envs, n_arms, 2)``."""
        return state[0] + 1

    def _initial_state(self, n_envs: int) -> OracleState:
        return np.zeros((n_envs, self.config.n_arms, 2), dtype=np.int64), np.full(n_envs, NO_ARM)

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        counts, last_arm = state
        pulled = np.flatnonzero(last_arm != NO_ARM)
        outcomes = np.where(observations[pulled] == 1, WINS, LOSSES)
        counts[pulled, last_arm[pulled], outcomes] += 1
        over = counts.sum(axis=(1, 2)).max() >= self.config.horizon
        require(not over, "state", f"holds all {self.config.horizon} pulls of an episode: tell `predict` when a new one starts")
        arms = self._choose(counts)
        return arms, (counts, arms)


class _DeterministicOracle(BanditOracle):
    """Always pulls the same arm when the counts are the same."""

    def distribution(self, counts: np.ndarray) -> np.ndarray:
        return np.eye(self.config.n_arms)[self._choose(counts)]


class BayesOptimal(_DeterministicOracle):
    """Attains :func:`bayes_optimal_value`, to be read from its attribute ``value``.

    :param config: the arguments of the environment
    :param discount: discount factor of the return to maximise
    """

    def __init__(self, config: BanditConfig | None = None, discount: float = 1.0) -> None:
        super().__init__(config)
        self._lattice = _Lattice(self.config)
        self.value, self._best_arms = _solve(self._lattice, discount)

    def _choose(self, counts: np.ndarray) -> np.ndarray:
        times, rows = counts.sum(axis=(1, 2)), self._lattice.row(counts)
        return np.array([self._best_arms[time][row] for time, row in zip(times, rows, strict=True)], dtype=np.int64)


class Gittins(_DeterministicOracle):
    """Pulls an arm with the largest :func:`gittins_index` for the pulls that are left, the first of them where several have it.

    Over a finite horizon this is not quite optimal (the index theorem is about infinite horizons), but close to it for any number
    of arms.

    :param config: the arguments of the environment
    :param discount: discount factor of the index
    """

    def __init__(self, config: BanditConfig | None = None, discount: float = 1.0) -> None:
        super().__init__(config)
        self.discount = discount

    def _choose(self, counts: np.ndarray) -> np.ndarray:
        times = counts.sum(axis=(1, 2))
        indices = np.empty(counts.shape[:2])
        for time in np.unique(times):
            now = times == time
            table = _index_table(int(time), self.config.horizon - int(time), self.discount)
            indices[now] = table[counts[now, :, WINS], counts[now, :, LOSSES]]
        return indices.argmax(axis=1)


class Greedy(_DeterministicOracle):
    """Pulls an arm with the largest posterior mean, the first of them where several have it.

    :param config: the arguments of the environment
    """

    def _choose(self, counts: np.ndarray) -> np.ndarray:
        return posterior_mean(counts).argmax(axis=1)


class Thompson(BanditOracle):
    """Draws the arms' probabilities from the posterior before every pull, and pulls the best of them.

    :param config: the arguments of the environment
    :param seed: seed of the draws
    """

    def distribution(self, counts: np.ndarray) -> np.ndarray:
        return probability_of_best(counts)

    def _choose(self, counts: np.ndarray) -> np.ndarray:
        return self.rng.beta(counts[..., WINS] + 1, counts[..., LOSSES] + 1).argmax(axis=1)


class RandomArm(BanditOracle):
    """Pulls each arm with the same probability.

    :param config: the arguments of the environment
    :param seed: seed of the draws
    """

    def distribution(self, counts: np.ndarray) -> np.ndarray:
        return np.full(counts.shape[:2], 1 / self.config.n_arms)

    def _choose(self, counts: np.ndarray) -> np.ndarray:
        return self.rng.integers(self.config.n_arms, size=len(counts))
