"""What BEN learns and what it comes to know, in tiny problems with known answers."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.envs import IdentityEnv
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_ben import BEN, evaluate_policy
from sb3_ben.ben.learning import BELLMAN_NOISE
from sb3_ben.ben.paper import PaperBEN
from sb3_ben.history.previous_reward import attach_reward

SMALL = {"net_arch": [16], "rnn_hidden_size": 16, "phi_dim": 16}
SEEN, UNSEEN = np.ones((1, 2), dtype=np.float32), np.array([[-3, 2]], dtype=np.float32)


class Arms(gym.Env):
    """Two arms, whose rewards have means 0 and 1 and standard deviation 1, and the same observation always.

    :param rewards: ``"normal"``, or ``"two"`` for rewards of two values
    :param horizon: number of pulls in an episode
    """

    observation_space, action_space = spaces.Box(-10, 10, (2,), dtype=np.float32), spaces.Discrete(2)

    def __init__(self, rewards: str = "normal", horizon: int = 1) -> None:
        self.rewards, self.horizon = rewards, horizon

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t = 0
        return SEEN[0], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        noise = self.np_random.normal() if self.rewards == "normal" else self.np_random.choice([-1.0, 1.0])
        return SEEN[0], float(action + noise), self.t == self.horizon, False, {}


def fitted(policy: str, env: gym.Env, n: int, seed: int = 0, **kwargs: Any) -> BEN:
    """An agent after many updates on n transitions of random actions, with steps that grow smaller."""
    settings: dict[str, Any] = {"batch_size": 256, "n_posterior_steps": 3, "n_phi_samples": 8, "sequence_length": 1}
    settings |= {"learning_rate": lambda left: 3e-3 * left**2}
    settings |= {"learning_starts": 10 * n, "buffer_size": n, "gamma": 0.5, "policy_kwargs": SMALL, "device": "cpu"}
    model = BEN(policy, env, seed=seed, **{**settings, **kwargs}).learn(n)
    for left in np.linspace(1, 0, 10, endpoint=False):
        model._current_progress_remaining = left
        model.train(20, model.batch_size)
    return model


def exact_std(model: BEN) -> np.ndarray:
    """The posterior standard deviation of each arm's mean, by conjugacy: prior and noise on b are those of the agent."""
    buffer = model.replay_buffer
    rewards, actions = buffer.rewards[: buffer.size(), 0], buffer.actions[: buffer.size(), 0, 0]
    unit = rewards.var()
    chosen = [rewards[actions == arm] for arm in range(2)]
    information = [len(one) / (one.var() + BELLMAN_NOISE**2 * unit) for one in chosen]
    return 1 / np.sqrt(1 / prior_std(model) ** 2 + np.array(information))


def prior_std(model: BEN) -> float:
    """The prior standard deviation of the mean of b: that of the shift and of the tilt."""
    return float(np.sqrt(2) * model.policy.prior_spread * model.policy.bellman_units.std)


@pytest.mark.parametrize("rewards", ["normal", "two"])
def test_uncertainty_is_that_of_the_exact_posterior(rewards: str) -> None:
    """Where data are it falls as one over the root of their number; where there are none it stays."""
    models = [fitted("MlpPolicy", Arms(rewards), n) for n in (64, 1024)]
    observations = np.concatenate((SEEN, UNSEEN))
    beliefs = [model.bellman_distribution(observations, n_samples=1024).epistemic_std for model in models]
    few, many = (one[0] for one in beliefs)
    assert few == pytest.approx(exact_std(models[0]), rel=0.3)
    assert many == pytest.approx(exact_std(models[1]), rel=0.35)
    assert 0.18 < many.mean() / few.mean() < 0.4  # 16 times as many data: a quarter, and a little more because of the prior
    for model, (seen, unseen) in zip(models, beliefs, strict=True):
        assert unseen.min() > 0.35 * prior_std(model)
        assert unseen.min() > 2.5 * seen.max()


def test_unseen_rewards_make_a_history_uncertain() -> None:
    """The same observation, after a reward like all others and after one that never occurred."""
    model = fitted("MlpGruPolicy", Arms(horizon=2), 512, sequence_length=2, batch_size=64)
    _, state = model.predict(SEEN, deterministic=True)

    def std_after(reward: float) -> np.ndarray:
        observation: Any = attach_reward(SEEN, np.array([reward], dtype=np.float32))
        return model.bellman_distribution(observation, state).epistemic_std[0]

    assert std_after(40.0).mean() > 1.5 * std_after(0.5).mean()


def identity(n_envs: int, n_actions: int) -> DummyVecEnv:
    return DummyVecEnv([lambda: IdentityEnv(dim=n_actions, ep_length=20) for _ in range(n_envs)])


def scores(seed: int = 0, **kwargs: Any) -> tuple[float, float]:
    """How often the agent names what it sees after training, and while exploring in the last steps of it."""
    settings: dict[str, Any] = {"learning_rate": 3e-3, "gamma": 0.5, "learning_starts": 64, "sequence_length": 20}
    settings |= {"train_freq": 1, "target_update_interval": 8, "policy_kwargs": SMALL, "device": "cpu"}
    algorithm = kwargs.pop("cls", BEN)
    model = algorithm("MlpPolicy", identity(8, 4), seed=seed, **settings, **kwargs).learn(2400)
    mean, _ = evaluate_policy(model, identity(1, 4), 10, deterministic=True, warn=False)
    buffer = model.replay_buffer
    return float(np.mean(mean)) / 20, float(buffer.rewards[buffer.pos - 20 : buffer.pos].mean())


@pytest.mark.parametrize(
    "kwargs",
    [
        {"exploration": "posterior"},
        {"cls": PaperBEN, "msbbe": "semi", "elbo": "exact", "exploration_final_eps": 0.0},
        {"cls": PaperBEN, "msbbe": "semi", "elbo": "exact", "exploration": "posterior"},
    ],
)
def test_options_learn_to_name_what_they_see(kwargs: dict[str, Any]) -> None:
    """Posterior sampling and episodic beliefs: with four actions, random ones are right in a quarter of all steps."""
    greedy, exploring = scores(**kwargs)
    assert greedy > 0.9
    assert exploring > 0.7
