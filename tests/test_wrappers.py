"""The wrappers that give baselines the inputs that BEN has."""

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from rl_zoo3.utils import get_wrapper_class
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

import sb3_ben.envs
from sb3_ben.history.wrappers import PreviousActionReward
from sb3_ben.oracles.rescue_prior import exact_filter
from sb3_ben.priors import BeliefObservation, Prior
from sb3_ben.priors.filters import BeliefTracker

ZOO_NAME = "sb3_ben.history.wrappers.PreviousActionReward"


class Echo(gym.Env):
    """Observes a counter and pays what the action says, in any spaces."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.count = 0

    def _observation(self) -> Any:
        space = self.observation_space
        if isinstance(space, spaces.Discrete):
            return space.start + self.count % space.n
        return np.full(space.shape, self.count, dtype=space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self._observation(), 10.0 * float(np.sum(action)), self.count == 3, False, {}


def test_discrete_observations_and_actions_are_one_hot() -> None:
    env = PreviousActionReward(Echo(spaces.Discrete(3, start=1), spaces.Discrete(2, start=5)))
    observation, _ = env.reset()
    np.testing.assert_array_equal(observation, [1, 0, 0, 0, 0, 0])
    observation, reward, *_ = env.step(6)
    np.testing.assert_array_equal(observation, [0, 1, 0, 0, 1, 60])
    assert reward == 60
    observation, *_ = env.step(5)
    np.testing.assert_array_equal(observation, [0, 0, 1, 1, 0, 50])


def test_a_reset_forgets() -> None:
    env = PreviousActionReward(Echo(spaces.Discrete(3), spaces.Discrete(2)))
    first, _ = env.reset()
    env.step(1)
    again, _ = env.reset()
    np.testing.assert_array_equal(first, again)


def test_box_is_flattened_and_the_reward_scaled() -> None:
    env = PreviousActionReward(Echo(spaces.Box(0, 9, (2, 2)), spaces.Box(1, 2, (2,))), reward_scale=0.1)
    assert env.observation_space == spaces.Box(
        np.array([0, 0, 0, 0, 0, 0, -np.inf], dtype=np.float32), np.array([9, 9, 9, 9, 2, 2, np.inf], dtype=np.float32)
    )
    observation, _ = env.reset()
    np.testing.assert_array_equal(observation, np.zeros(7))
    observation, reward, *_ = env.step(np.array([1.0, 1.5], dtype=np.float32))
    np.testing.assert_allclose(observation, [1, 1, 1, 1, 1, 1.5, 2.5])
    assert reward == 25, "the agent's own reward is not scaled"
    assert observation.dtype == np.float32


def test_the_last_observation_of_an_episode_carries_its_reward() -> None:
    """A VecEnv resets at once; the reward that ended the episode is in the terminal observation and not in the new one."""
    venv = DummyVecEnv([lambda: PreviousActionReward(Echo(spaces.Discrete(4), spaces.Discrete(2)))])
    venv.reset()
    for _ in range(3):
        observations, _, dones, infos = venv.step(np.array([1]))
    assert dones[0]
    assert isinstance(observations, np.ndarray)
    np.testing.assert_array_equal(infos[0]["terminal_observation"], [0, 0, 0, 1, 0, 1, 10])
    np.testing.assert_array_equal(observations[0], [1, 0, 0, 0, 0, 0, 0])


@pytest.mark.filterwarnings("ignore:.*(infinity|unwrapped version)")  # a reward has no bounds, and we do check a wrapper
@pytest.mark.parametrize("env_id", [*sb3_ben.envs.ENVIRONMENTS, "CartPole-v1"])
def test_gymnasium_checker(env_id: str) -> None:
    check_env(PreviousActionReward(gym.make(env_id).unwrapped), skip_render_check=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_scales_that_make_no_sense(scale: float) -> None:
    with pytest.raises(ValueError, match="reward_scale"):
        PreviousActionReward(gym.make("CartPole-v1"), reward_scale=scale)


def test_refuses_spaces_without_a_fixed_length() -> None:
    with pytest.raises(ValueError, match="observation space"):
        PreviousActionReward(Echo(spaces.Sequence(spaces.Discrete(2)), spaces.Discrete(2)))


def test_through_the_zoo_in_processes_as_in_line() -> None:
    """The zoo's syntax, in workers as in the process itself."""
    wrapper = get_wrapper_class({"env_wrapper": [{ZOO_NAME: {"reward_scale": 0.01}}]})
    rows: list[Any] = []
    for vec_env_cls in (DummyVecEnv, SubprocVecEnv):
        venv = make_vec_env("Tiger-v0", 2, seed=3, wrapper_class=wrapper, vec_env_cls=vec_env_cls)
        rows.append([venv.reset(), *(venv.step(np.array([2, action]))[0] for action in (0, 1, 2))])
        venv.close()
    np.testing.assert_array_equal(rows[0], rows[1])
    assert np.shape(rows[0]) == (4, 2, 3 + 3 + 1)
    assert rows[0][1][0][-1] == pytest.approx(-0.01), "listening costs 1"


def test_pickles_with_its_arguments() -> None:
    env = pickle.loads(pickle.dumps(PreviousActionReward(gym.make("CartPole-v1"), reward_scale=0.5)))
    assert env.reward_scale == 0.5


def test_observed_beliefs_are_those_of_ben() -> None:
    """Step by step what a filter says that sees the same episodes; anew after every reset."""
    kwargs: dict[str, Any] = {"grid_size": 3, "n_victims": 1, "n_hazards": 1, "horizon": 6}
    env = BeliefObservation(gym.make("SearchAndRescue-v0", **kwargs), "sb3_ben.oracles.rescue_prior.exact_filter")
    belief = exact_filter(DummyVecEnv([lambda: gym.make("SearchAndRescue-v0", **kwargs)])).belief
    assert belief is not None
    tracker = BeliefTracker([belief])
    size = tracker.dim
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        believed = tracker.begin(observation[None, :-size])
        done = False
        while not done:
            assert np.array_equal(observation[-size:], believed.features[0])
            assert env.observation_space.contains(observation)
            action = env.action_space.sample()
            observation, reward, terminated, truncated, _ = env.step(action)
            believed = tracker.advance(believed.state, observation[None, :-size], np.array([action]), np.array([float(reward)]))
            done = terminated or truncated
        assert np.array_equal(observation[-size:], believed.features[0])


def test_beliefs_are_observed_through_the_zoo() -> None:
    name = "sb3_ben.priors.BeliefObservation"
    hyperparams = {"env_wrapper": [{name: {"prior": "sb3_ben.oracles.rescue_prior.exact_filter"}}, ZOO_NAME]}
    venv = make_vec_env("SearchAndRescue5x5-v0", 2, wrapper_class=get_wrapper_class(hyperparams))
    assert venv.observation_space.contains(np.asarray(venv.reset())[0])
    assert np.isfinite(np.asarray(venv.step(np.array([4, 0]))[0])).all()


def test_only_beliefs_can_be_observed() -> None:
    with pytest.raises(ValueError, match="no belief"):
        BeliefObservation(gym.make("Tiger-v0"), Prior())
    with pytest.raises(ValueError, match="discrete actions"):
        BeliefObservation(gym.make("Pendulum-v1"), "sb3_ben.oracles.rescue_prior.exact_filter")
