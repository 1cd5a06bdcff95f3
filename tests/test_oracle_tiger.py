"""The tiger oracles against published and independently computed values."""

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.evaluation import evaluate_policy as sb3_evaluate_policy

from sb3_ben.common.evaluation import evaluate_policy
from sb3_ben.envs.tiger import LISTEN, OPEN_1, OPEN_2, TigerConfig, TigerEnv, TigerVecEnv
from sb3_ben.history.previous_reward import VecPreviousReward, attach_reward
from sb3_ben.oracles import tiger

NOISIER = TigerConfig(p_correct=0.85, p_wrong=0.15)
ORACLES = [tiger.BayesOptimal, tiger.ArgMaxQMDP, tiger.PosteriorSampling, tiger.AlwaysListen]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (tiger.bayes_optimal_values(TigerConfig()).value, 68.952),
        (tiger.bayes_optimal_values(NOISIER).value, 61.945),
        (tiger.qmdp_values(TigerConfig()).value, 68.952),
        (tiger.qmdp_values(NOISIER).value, 59.928),
        (tiger.posterior_sampling_value(TigerConfig()), -155.0),
        (tiger.bayes_optimal_values(TigerConfig(), discount=1.0, horizon=11).value, 74.517),
        (tiger.posterior_sampling_value(TigerConfig(), discount=1.0, horizon=11), -145.0),
    ],
)
def test_known_values(value: float, expected: float) -> None:
    assert value == pytest.approx(expected, abs=5e-4)


def brute_force_value(config: TigerConfig, weights: tuple[float, float], discount: float, steps: int) -> float:
    """Bayes-optimal value by recursion over all histories, with unnormalised weights of the two contexts."""
    if steps == 0:
        return 0.0
    total, known = sum(weights), max(config.reward_gold, config.reward_tiger, config.reward_listen)
    future = discount * known * sum(discount**k for k in range(steps - 1)) * total
    rewards = (config.reward_tiger, config.reward_gold)
    opens = [sum(w * rewards[door ^ context] for context, w in enumerate(weights)) + future for door in (0, 1)]
    silent = 1 - config.p_correct - config.p_wrong
    listen = config.reward_listen * total
    for likelihoods in ((config.p_correct, config.p_wrong), (config.p_wrong, config.p_correct), (silent, silent)):
        after = (weights[0] * likelihoods[0], weights[1] * likelihoods[1])
        if sum(after) > 0:
            listen += discount * brute_force_value(config, after, discount, steps - 1)
    return max(*opens, listen)


@pytest.mark.parametrize("config", [TigerConfig(), NOISIER, TigerConfig(p_correct=0.4, p_wrong=0.5), TigerConfig(1.0, 0.0)])
@pytest.mark.parametrize(("discount", "prior"), [(0.9, 0.5), (1.0, 0.3)])
def test_dynamic_programming_against_all_histories(config: TigerConfig, discount: float, prior: float) -> None:
    solved = tiger.bayes_optimal_values(config, discount, horizon=6, prior=prior)
    assert solved.value == pytest.approx(brute_force_value(config, (prior, 1 - prior), discount, 6))


@pytest.mark.parametrize("reward_listen", [-1.0, 20.0])
def test_other_rewards(reward_listen: float) -> None:
    config = TigerConfig(reward_tiger=-30.0, reward_gold=7.0, reward_listen=reward_listen)
    solved = tiger.bayes_optimal_values(config, 1.0, horizon=6)
    assert solved.value == pytest.approx(brute_force_value(config, (0.5, 0.5), 1.0, 6))


def test_action_values_of_beliefs() -> None:
    values = tiger.action_values(TigerConfig(), [[0.0, 0.5], [1.0, 0.01]])
    assert values.shape == (2, 2, 3)
    assert values[0, 0] == pytest.approx([100, -410, 89])  # nothing left to learn: 10 for ever, one tiger first, one listen first
    assert values[1, 0] == pytest.approx([-410, 100, 89])
    assert values[0, 1, LISTEN] == pytest.approx(68.952, abs=5e-4)
    assert values[0, 1, OPEN_1] == values[0, 1, OPEN_2] == pytest.approx(-155)


def test_action_values_are_consistent_along_the_line() -> None:
    """The values of a reached belief do not depend on where the recursion started."""
    line = tiger.bayes_optimal_values(TigerConfig())
    centre = len(line.beliefs) // 2
    for net in (-3, -1, 2):
        direct = tiger.action_values(TigerConfig(), line.beliefs[centre + net])
        assert direct == pytest.approx(line.action_values[0, centre + net], abs=1e-6)


def test_uninformative_listening() -> None:
    deaf = TigerConfig(p_correct=0.3, p_wrong=0.3)
    assert tiger.bayes_optimal_values(deaf).value == pytest.approx(-10)  # listens for ever
    assert np.all(tiger.belief_after(deaf, [-5, 0, 5]) == 0.5)


def exact_return(oracle: tiger.BayesOptimal, config: TigerConfig, context: int) -> float:
    """Expected undiscounted return of an oracle in one context, over all 3^(horizon - 1) sequences of hearings."""
    total = 0.0
    likelihood = {1: [config.p_correct, config.p_wrong][context], 2: [config.p_wrong, config.p_correct][context]}
    likelihood[0] = 1 - likelihood[1] - likelihood[2]
    for hearings in itertools.product(range(3), repeat=config.horizon):
        probability, state, observation, reward, ret = 1.0, None, 0, 0.0, 0.0
        for heard in hearings:
            action, state = oracle.predict(observe(observation, reward), state)
            listened = action[0] == LISTEN
            probability *= likelihood[heard] if listened else heard == 0  # opening: count one branch only
            reward = config.reward_listen if listened else (config.reward_tiger, config.reward_gold)[int(action[0] != context)]
            observation, ret = heard if listened else 0, ret + reward
        total += probability * ret
    return total


def observe(observation: int, reward: float) -> np.ndarray:
    return attach_reward(np.array([observation]), np.array([reward], dtype=np.float32))  # type: ignore[return-value]


def test_policy_attains_its_value() -> None:
    """Acting by predict, over every possible sequence of hearings, gives exactly the value of the dynamic programme."""
    config = TigerConfig(horizon=5, reward_tiger=-30.0)
    oracle = tiger.BayesOptimal(config)
    mean = np.mean([exact_return(oracle, config, context) for context in (0, 1)])
    assert mean == pytest.approx(oracle.values.value)


@pytest.mark.parametrize(
    ("oracle_class", "expected"),
    [
        (tiger.BayesOptimal, 74.517),
        (tiger.ArgMaxQMDP, tiger.qmdp_values(TigerConfig(), 1.0, 11).value),
        (tiger.PosteriorSampling, -145.0),
        (tiger.AlwaysListen, -11.0),
    ],
)
def test_returns_in_the_environment(oracle_class: type, expected: float) -> None:
    returns, _ = evaluate_policy(oracle_class(), TigerVecEnv(256, seed=1), n_eval_episodes=4096, return_episode_rewards=True)
    standard_error = np.std(returns) / np.sqrt(len(returns))
    assert abs(np.mean(returns) - expected) <= 4 * standard_error + 1e-9


def test_bayes_optimal_of_the_discounted_problem() -> None:
    oracle = tiger.BayesOptimal(values=tiger.bayes_optimal_values(TigerConfig(), discount=0.9))
    mean, _ = evaluate_policy(oracle, TigerVecEnv(64, seed=0), n_eval_episodes=512)
    assert 60 < mean < 80


@pytest.mark.parametrize("oracle_class", ORACLES)
def test_predict_contract(oracle_class: type) -> None:
    oracle = oracle_class()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        action, state = oracle.predict(0)
        assert action.shape == ()
        actions, state = oracle.predict(np.zeros(3, dtype=int))
        actions, state = oracle.predict(np.zeros(3, dtype=int), state, np.array([True, False, False]))
        assert actions.shape == (3,)
        assert [len(part) for part in state] == [3] * len(state)
    with pytest.raises(ValueError, match="shape"):
        oracle.predict(np.zeros((2, 2)))


def test_episode_start_forgets_and_state_is_not_changed_in_place() -> None:
    oracle = tiger.BayesOptimal()
    _, state = oracle.predict(observe(0, 0.0))
    before = [part.copy() for part in state]
    _, later = oracle.predict(observe(1, -1.0), state)
    assert oracle.beliefs(later) == pytest.approx([0.85 / 0.95])
    assert all(np.array_equal(a, b) for a, b in zip(before, state, strict=True))
    _, fresh = oracle.predict(observe(1, -1.0), later, np.array([True]))
    assert oracle.beliefs(fresh) == pytest.approx([0.5])


def test_raw_environment_warns_once_and_runs() -> None:
    """SB3's own evaluation of a raw environment has no rewards to offer: the oracle says so and goes on by ear."""
    oracle = tiger.PosteriorSampling(seed=0)
    with pytest.warns(UserWarning, match="VecPreviousReward"):
        sb3_evaluate_policy(oracle, TigerEnv(), n_eval_episodes=2, warn=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sb3_evaluate_policy(oracle, TigerEnv(), n_eval_episodes=2, warn=False)
        sb3_evaluate_policy(tiger.BayesOptimal(), VecPreviousReward(TigerVecEnv(4)), n_eval_episodes=8, warn=False)


def test_best_agent_without_rewards() -> None:
    """Where rewards cannot be seen, opening teaches nothing: the oracle is the best agent for that problem."""
    oracle = tiger.BayesOptimal()
    assert oracle.unrewarded.value == pytest.approx(60.44, abs=0.01)
    with pytest.warns(UserWarning, match="VecPreviousReward"):
        scores, _ = sb3_evaluate_policy(oracle, TigerVecEnv(256, seed=2), 4096, return_episode_rewards=True, warn=False)
    returns = np.asarray(scores)
    assert abs(np.mean(returns) - oracle.unrewarded.value) <= 4 * np.std(returns) / np.sqrt(len(returns))


def test_rewards_that_hardly_differ_are_told_apart() -> None:
    config = TigerConfig(reward_tiger=-500_000.0, reward_gold=-499_996.0, reward_listen=-499_999.0)
    oracle = tiger.BayesOptimal(config)
    returns, _ = evaluate_policy(oracle, TigerVecEnv(256, seed=0, **vars(config)), 2048, return_episode_rewards=True, warn=False)
    assert abs(np.mean(returns) - oracle.values.value) <= 4 * np.std(returns) / np.sqrt(len(returns)) + 0.5


def test_state_of_another_size_is_refused() -> None:
    oracle = tiger.AlwaysListen()
    with pytest.raises(ValueError, match="state"):
        oracle.predict(np.zeros(3, dtype=int), oracle.predict(0)[1])


@pytest.mark.parametrize(("discount", "horizon"), [(1.0, None), (1.5, 3), (0.9, 0), (0.9, 2.5)])
def test_bad_problems(discount: float, horizon: Any) -> None:
    for value in (tiger.bayes_optimal_values, tiger.qmdp_values, tiger.posterior_sampling_value):
        with pytest.raises(ValueError, match=r"discount|horizon"):
            value(TigerConfig(), discount, horizon)
    with pytest.raises(ValueError, match="prior"):
        tiger.belief_after(TigerConfig(), 1, prior=2.0)


@pytest.mark.parametrize(
    ("arguments", "name"), [({"discount": 1.0}, "discount"), ({"discount": 1.2}, "discount"), ({"horizon": 0}, "horizon")]
)
def test_bad_arguments(arguments: dict, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        tiger.bayes_optimal_values(TigerConfig(), **arguments)
