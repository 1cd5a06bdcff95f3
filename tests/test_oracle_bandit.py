"""The bandit's oracles against hand calculations, brute force, published indices and their own play."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.vec_env import VecMonitor

from sb3_ben.common.evaluation import evaluate_policy
from sb3_ben.envs import register_envs
from sb3_ben.envs.bandit import BanditConfig, BernoulliBanditVecEnv
from sb3_ben.oracles.bandit import (
    BanditOracle,
    BayesOptimal,
    Gittins,
    Greedy,
    RandomArm,
    Thompson,
    bayes_optimal_value,
    gittins_index,
    policy_value,
    probability_of_best,
)

ORACLES: list[type[BanditOracle]] = [RandomArm, Thompson, Greedy, Gittins, BayesOptimal]
Counts = tuple[tuple[int, int], ...]


def brute_force_value(n_arms: int, horizon: int, discount: float) -> float:
    """The textbook recursion, on tuples."""

    @lru_cache(None)
    def value(counts: Counts, left: int) -> float:
        return max((pull(counts, arm, left) for arm in range(n_arms)), default=0.0) if left else 0.0

    def pull(counts: Counts, arm: int, left: int) -> float:
        wins, losses = counts[arm]
        p = (wins + 1) / (wins + losses + 2)
        won, lost = ((*counts[:arm], after, *counts[arm + 1 :]) for after in ((wins + 1, losses), (wins, losses + 1)))
        return p * (1 + discount * value(won, left - 1)) + (1 - p) * discount * value(lost, left - 1)

    return value(((0, 0),) * n_arms, horizon)


def calibrated_index(wins: int, losses: int, remaining: int, discount: float) -> float:
    """The index by its other definition: the sure payment per pull that makes one indifferent to pulling the arm first."""

    def gain(payment: float) -> float:
        @lru_cache(None)
        def value(w: int, n: int) -> float:
            if n == remaining:
                return 0.0
            p = (wins + w + 1) / (wins + losses + n + 2)
            return max(0.0, p - payment + discount * (p * value(w + 1, n + 1) + (1 - p) * value(w, n + 1)))

        return value(0, 0)

    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) > 1e-15 else (low, middle)
    return low


@pytest.mark.parametrize("n_arms", [2, 3, 7])
def test_one_pull_is_a_coin_flip(n_arms: int) -> None:
    assert bayes_optimal_value(BanditConfig(n_arms, 1)) == 0.5


def test_two_pulls_by_hand() -> None:
    # stay after a win (2/3), switch after a loss (1/2)
    assert bayes_optimal_value(BanditConfig(2, 2)) == pytest.approx(1 / 2 + 1 / 2 * 2 / 3 + 1 / 2 * 1 / 2)
    assert bayes_optimal_value(BanditConfig(2, 2), discount=0.6) == pytest.approx(1 / 2 + 0.6 * 7 / 12)


def test_three_pulls_by_hand() -> None:
    # win (1/2): stay; then stay after win-win (3/4), and after win-loss both arms are worth 1/2
    # loss (1/2): switch; then stay after loss-win (2/3), return to the first (1/3) or stay (1/3) after loss-loss
    after_win = 2 / 3 * (1 + 3 / 4) + 1 / 3 * 1 / 2
    after_loss = 1 / 2 * (1 + 2 / 3) + 1 / 2 * 1 / 3
    assert bayes_optimal_value(BanditConfig(2, 3)) == pytest.approx(1 / 2 * (1 + after_win) + 1 / 2 * after_loss)


@pytest.mark.parametrize(
    ("n_arms", "horizon", "discount"), [(2, 4, 1.0), (2, 9, 0.8), (3, 5, 1.0), (3, 7, 0.95), (4, 4, 1.0), (2, 3, 0.0)]
)
def test_value_equals_brute_force(n_arms: int, horizon: int, discount: float) -> None:
    expected = brute_force_value(n_arms, horizon, discount)
    assert bayes_optimal_value(BanditConfig(n_arms, horizon), discount) == pytest.approx(expected, rel=1e-12)


def test_values_on_record() -> None:
    values = {(2, 20): 12.431265, (2, 50): 31.996712, (3, 10): 6.409643, (3, 20): 13.465831}
    for (n_arms, horizon), value in values.items():
        assert bayes_optimal_value(BanditConfig(n_arms, horizon)) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_the_optimal_oracle_attains_the_optimal_value(discount: float) -> None:
    for config in (BanditConfig(2, 20), BanditConfig(3, 9)):
        oracle = BayesOptimal(config, discount)
        assert policy_value(oracle, discount) == pytest.approx(oracle.value, rel=1e-12)
        assert oracle.value == bayes_optimal_value(config, discount)


@pytest.mark.parametrize("config", [BanditConfig(2, 20), BanditConfig(3, 12), BanditConfig(4, 8)])
def test_order_of_the_policies(config: BanditConfig) -> None:
    values = [policy_value(oracle(config)) for oracle in ORACLES]
    assert values[0] == pytest.approx(config.horizon / 2)
    assert values[0] < values[1] < values[2] < values[3] <= values[4] + 1e-12
    assert values[4] < config.horizon * config.n_arms / (config.n_arms + 1)  # what one wins who knows the arms


@pytest.mark.parametrize(
    ("discount", "indices"),
    [
        (0.9, {(0, 0): 0.7029, (1, 0): 0.8001, (0, 1): 0.5001, (1, 1): 0.6346, (2, 2): 0.6010, (9, 1): 0.8695}),
        (0.99, {(0, 0): 0.8699}),
    ],
)
def test_published_gittins_indices(discount: float, indices: dict[tuple[int, int], float]) -> None:
    """The table of Gittins, Multi-armed Bandit Allocation Indices (1989)."""
    remaining = int(20 / (1 - discount))  # e^-20 of the future is left out
    computed = gittins_index(np.array(list(indices)), remaining, discount)
    np.testing.assert_allclose(computed, list(indices.values()), rtol=0, atol=5e-5)


@pytest.mark.parametrize("discount", [1.0, 0.7])
def test_finite_horizon_index_equals_its_calibration(discount: float) -> None:
    counts = np.array(list(product(range(3), range(3))))
    for remaining in (1, 2, 7):
        expected = [calibrated_index(wins, losses, remaining, discount) for wins, losses in counts.tolist()]
        np.testing.assert_allclose(gittins_index(counts, remaining, discount), expected, atol=1e-10)


def test_index_by_hand() -> None:
    # two pulls of a fresh arm: give up after a loss; 1/2 + 1/2 * 2/3 wins in 1 + 1/2 pulls
    assert gittins_index(np.array([0, 0]), 2) == pytest.approx(5 / 9)


def test_discounted_gittins_is_optimal_over_a_long_horizon() -> None:
    config, discount = BanditConfig(2, 60), 0.7  # 0.7^60 makes it as good as infinite
    assert policy_value(Gittins(config, discount), discount) == pytest.approx(bayes_optimal_value(config, discount), rel=1e-9)


def test_probability_of_best() -> None:
    assert probability_of_best(np.zeros((1, 5, 2), dtype=int))[0] == pytest.approx(np.full(5, 0.2))
    # one win against nothing: the integral of 2x * x
    assert probability_of_best(np.array([[[1, 0], [0, 0]]]))[0] == pytest.approx([2 / 3, 1 / 3])
    counts = np.random.default_rng(0).integers(0, 9, (50, 3, 2))
    np.testing.assert_allclose(probability_of_best(counts).sum(axis=1), 1.0, rtol=1e-12)
    draws = np.random.default_rng(1).beta(counts[0, :, 0] + 1, counts[0, :, 1] + 1, (40_000, 3)).argmax(axis=1)
    assert probability_of_best(counts)[0] == pytest.approx(np.bincount(draws, minlength=3) / 40_000, abs=0.01)


@pytest.mark.parametrize("oracle_class", ORACLES)
def test_play_agrees_with_the_exact_value(oracle_class: type[BanditOracle]) -> None:
    config = BanditConfig(3, 12)
    oracle = oracle_class(config) if issubclass(oracle_class, (BayesOptimal, Gittins)) else oracle_class(config, seed=1)
    venv = VecMonitor(BernoulliBanditVecEnv(500, seed=0, n_arms=3, horizon=12))
    returns, _ = evaluate_policy(oracle, venv, n_eval_episodes=3000, return_episode_rewards=True)
    assert abs(np.mean(returns) - policy_value(oracle)) < 4 * np.std(returns) / np.sqrt(len(returns))


@pytest.mark.parametrize("oracle_class", ORACLES)
def test_predict_in_a_plain_environment(oracle_class: type[BanditOracle]) -> None:
    register_envs()
    env = gym.make("BernoulliBandit-v0", n_arms=3, horizon=6)
    oracle = oracle_class(BanditConfig(3, 6))
    observation, _ = env.reset(seed=0)
    state, ended, total, arms = None, False, 0.0, []
    while not ended:
        arm, state = oracle.predict(observation, state, deterministic=True)
        observation, reward, ended, _, _ = env.step(arm)
        arms.append(int(arm))
        total += float(reward)
    assert state is not None
    beliefs = oracle.beliefs(state)[0]
    assert beliefs.sum() == 2 * 3 + 5  # the outcome of the sixth pull has not been shown to it
    np.testing.assert_array_equal(beliefs.sum(axis=1) - 2, np.bincount(arms[:-1], minlength=3))
    assert beliefs[:, 0].sum() - 3 == total - observation


def test_environments_of_a_batch_do_not_mix() -> None:
    oracle = Gittins(BanditConfig(2, 10))
    _, state = oracle.predict(np.array([0, 0]))
    before = [part.copy() for part in state]
    arms, later = oracle.predict(np.array([1, 0]), state)
    assert arms.tolist() == [0, 1]  # stay after the win, switch after the loss
    for part, copy in zip(state, before, strict=True):
        np.testing.assert_array_equal(part, copy)
    arms, later = oracle.predict(np.array([0, 1]), later, episode_start=np.array([False, True]))
    assert oracle.beliefs(later).tolist() == [[[2, 2], [1, 1]], [[1, 1], [1, 1]]]
    assert arms[1] == 0


def test_an_episode_too_long_is_noticed() -> None:
    oracle = Greedy(BanditConfig(2, 1))
    _, state = oracle.predict(np.array([0]))
    with pytest.raises(ValueError, match="`state` holds all 1 pulls"):
        oracle.predict(np.array([1]), state)


def test_too_large_problems_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`horizon` 30 is too long .* 5 arms: it takes 10\^8 counts"):
        bayes_optimal_value(BanditConfig(5, 30))


@pytest.mark.parametrize("discount", [-0.1, 1.1, float("nan")])
def test_bad_discounts_are_refused(discount: float) -> None:
    with pytest.raises(ValueError, match="`discount`"):
        bayes_optimal_value(BanditConfig(2, 2), discount)
    with pytest.raises(ValueError, match="`discount`"):
        gittins_index(np.array([0, 0]), 3, discount)
