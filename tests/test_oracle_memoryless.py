"""The best agents without a memory: their exact values against hand calculation, against simulation and against all others."""

from __future__ import annotations

import numpy as np
import pytest

from sb3_ben import evaluate_policy, make_vec
from sb3_ben.envs.bandit import BanditConfig
from sb3_ben.envs.tiger import LISTEN, TigerConfig
from sb3_ben.oracles import bandit, tiger
from sb3_ben.oracles.memoryless import BestMemorylessBandit, BestMemorylessTiger, bandit_inputs, best_memoryless, tiger_inputs


def test_tiger_by_hand() -> None:
    """Without failed hearings: one of them, a door by it, and then gold, whatever was behind the first."""
    config = TigerConfig(p_correct=0.9, p_wrong=0.1)
    by_hand = -1 + (0.9 * 10 - 0.1 * 500) + 9 * 10
    agent = BestMemorylessTiger(config)
    assert agent.value == pytest.approx(by_hand)
    assert agent.policy.tolist() == [LISTEN, agent.policy[1], 1, 0, 0, 1, 1, 0]


def test_bandit_by_hand() -> None:
    """Two pulls: 1/2, and after a win the same arm again (2/3), after a loss the other one (1/2)."""
    value, _ = best_memoryless(bandit_inputs(BanditConfig(horizon=2)), horizon=2)
    assert value == pytest.approx(1 / 2 + (2 / 3 + 1 / 2) / 2)


def test_bandit_stays_after_wins_and_shifts_after_losses() -> None:
    assert BestMemorylessBandit(BanditConfig()).policy[1:].tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("n_arms", [2, 3])
def test_chains_are_chains(n_arms: int) -> None:
    for inputs in (bandit_inputs(BanditConfig(n_arms=n_arms, horizon=5)), tiger_inputs(TigerConfig())):
        assert inputs.weights.sum() == pytest.approx(1)
        np.testing.assert_allclose(inputs.transitions.sum(axis=-1), 1)


@pytest.mark.parametrize(
    ("env_id", "agent"),
    [("Tiger-v0", BestMemorylessTiger(TigerConfig())), ("BernoulliBandit-v0", BestMemorylessBandit(BanditConfig()))],
)
def test_values_are_those_of_episodes(env_id: str, agent: BestMemorylessTiger | BestMemorylessBandit) -> None:
    returns, _ = evaluate_policy(agent, make_vec(env_id, 500, seed=1), 5000, return_episode_rewards=True, warn=False)
    error = np.std(returns) / len(returns) ** 0.5
    assert abs(np.mean(returns) - agent.value) < 4 * error


def test_a_memory_is_worth_something() -> None:
    assert BestMemorylessTiger(TigerConfig()).value < tiger.bayes_optimal_values(TigerConfig(), discount=1.0, horizon=11).value
    assert BestMemorylessBandit(BanditConfig()).value < bandit.BayesOptimal().value
