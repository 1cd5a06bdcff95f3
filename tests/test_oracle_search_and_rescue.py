"""The search and rescue filter against brute force and its own predictions, and the agents against their bounds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.evaluation import evaluate_policy as sb3_evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

from sb3_ben.common.evaluation import evaluate_policy
from sb3_ben.envs.search_and_rescue import (
    LEFT,
    LISTEN,
    RIGHT,
    UP,
    Rescue,
    SearchAndRescueConfig,
    SearchAndRescueEnv,
    SearchAndRescueVecEnv,
    door_centres,
)
from sb3_ben.history.previous_reward import VecPreviousReward, attach_reward
from sb3_ben.oracles.rescue_filter import Door, FilterState, RescueFilter, bethe_marginals, exclusive_marginals
from sb3_ben.oracles.search_and_rescue import BeliefAgent, KnowsTheMap, NeverOpens, RandomAgent, shortest_tours

TINY: dict[str, Any] = {"grid_size": 3, "n_victims": 2, "n_hazards": 1, "sigma_noise": 0.3}
SMALL: dict[str, Any] = {"grid_size": 5, "n_victims": 3, "n_hazards": 5}


class Step(NamedTuple):
    """One step of a recorded episode."""

    opened: int
    action: int
    observation: np.ndarray
    reward: float


def play(
    kwargs: dict[str, Any], actions: np.ndarray, seed: int = 0, contexts: list[Rescue] | None = None
) -> tuple[SearchAndRescueVecEnv, FilterState, list[list[Step]]]:
    """Take actions of shape ``(n_steps, n_envs)``; return the environment, the filter's state and the history of each episode."""
    venv = SearchAndRescueVecEnv(actions.shape[1], seed=seed, **kwargs)
    if contexts is not None:
        venv.set_options([{"context": context} for context in contexts])
    world: Any = venv.world
    belief = RescueFilter(world.config)
    venv.reset()
    state, steps = belief.initial(venv.num_envs), []
    for chosen in actions:
        opened = belief.opened_door(state.position, chosen)
        observations, rewards, _, _ = venv.step(chosen)
        state = belief.update(state, np.asarray(observations), chosen, rewards)
        steps.append([Step(*row) for row in zip(opened, chosen, observations, rewards, strict=True)])
    return venv, state, [list(episode) for episode in zip(*steps, strict=True)]


def is_consistent(config: SearchAndRescueConfig, doors: tuple[int, ...], history: list[Step]) -> bool:
    """Whether an assignment of entities to doors explains the rewards and which victims have fallen silent."""
    present = set(range(config.n_entities))
    for step in history:
        found = [e for e in present if doors[e] == step.opened]
        rescued = [e for e in found if e < config.n_victims]
        reward = config.reward_victim if rescued else config.reward_hazard if found else 0.0
        present -= set(rescued)
        if step.action == LISTEN:
            reward = config.reward_listen
            if present != set(np.flatnonzero(step.observation[2:])):
                return False
        if reward != step.reward:
            return False
    return True


def brute_likelihoods(config: SearchAndRescueConfig, history: list[Step], n_points: int = 80) -> np.ndarray:
    """Likelihood of the readings of each entity, averaged over a fine mesh behind each door, ``(n_entities, n_doors)``."""
    side = (np.arange(n_points) + 0.5) / n_points - 0.5
    mesh = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    points = door_centres(config.grid_size)[:, None] + mesh
    log_likelihoods = np.zeros((config.n_entities, *points.shape[:2]))
    for step in history:
        for e in np.flatnonzero(step.observation[2:]) if step.action == LISTEN else []:
            expected = -((points - step.observation[:2]) ** 2).sum(axis=-1) / config.grid_size
            log_likelihoods[e] -= 0.5 * ((np.log(step.observation[2 + e]) - expected) / config.sigma_noise) ** 2
    return np.exp(log_likelihoods - log_likelihoods.max(axis=(1, 2), keepdims=True)).mean(axis=2)


def brute_posterior(config: SearchAndRescueConfig, history: list[Step]) -> np.ndarray:
    """Probability of each entity behind each door by a sum over all injective assignments."""
    likelihoods = brute_likelihoods(config, history)
    posterior = np.zeros_like(likelihoods)
    entities = np.arange(config.n_entities)
    for doors in itertools.permutations(range(config.n_doors), config.n_entities):
        if is_consistent(config, doors, history):
            posterior[entities, doors] += likelihoods[entities, doors].prod()
    return posterior / posterior.sum(axis=1, keepdims=True)


def rng_weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).random(shape) ** 4


def test_exclusion_is_the_marginal_of_a_permanent() -> None:
    weights, vacant = rng_weights((4, 3, 6)), np.array([[1.0, 1, 0, 1, 1, 1]]).repeat(4, axis=0)
    expected = np.zeros_like(weights)
    for doors in itertools.permutations(range(6), 3):
        empty = [d for d in range(6) if d not in doors]
        weight = weights[:, range(3), doors].prod(axis=1) * vacant[:, empty].prod(axis=1)
        expected[:, range(3), doors] += weight[:, None]
    expected /= expected.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(exclusive_marginals(weights, vacant), expected, atol=1e-12)


def test_exclusion_in_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, vacant = rng_weights((5, 4, 8)), np.ones((5, 8))
    whole = exclusive_marginals(weights, vacant)
    monkeypatch.setattr("sb3_ben.oracles.rescue_filter.TABLE_SIZE", 2 * 9 * 2**4)
    np.testing.assert_allclose(exclusive_marginals(weights, vacant), whole, atol=1e-12)


def test_as_many_entities_as_doors() -> None:
    weights = rng_weights((1, 4, 4))
    marginals = exclusive_marginals(weights, np.ones((1, 4)))
    np.testing.assert_allclose(marginals.sum(axis=1), 1, atol=1e-12)


def test_belief_propagation_is_close_to_exact() -> None:
    weights, vacant = rng_weights((20, 8, 20)), np.ones((20, 20))
    exact, without = exclusive_marginals(weights, vacant), weights / weights.sum(axis=2, keepdims=True)
    error = abs(bethe_marginals(weights, vacant) - exact).max()
    assert error < 0.02 < abs(without - exact).max()


def test_filter_equals_brute_force() -> None:
    config = SearchAndRescueConfig(**TINY)
    actions = np.random.default_rng(3).integers(5, size=(14, 12))
    _, state, histories = play(TINY, actions)
    posterior = RescueFilter(config).posterior(state)
    kinds = set()
    for i, history in enumerate(histories):
        expected = brute_posterior(config, history)
        told_apart = (state.gone[i] == 0) | (state.gone[i].sum() < 2)
        np.testing.assert_allclose(posterior.entities[i, told_apart], expected[told_apart], atol=2e-3)
        victims = expected[:2].sum(axis=0) * (state.doors[i] == Door.UNOPENED)
        np.testing.assert_allclose(posterior.doors[i, :, 1:], np.stack((victims, expected[2]), axis=-1), atol=2e-3)
        kinds |= set(state.doors[i])
    assert kinds >= {Door.EMPTY, Door.HAZARD, Door.RESCUED, Door.RESCUED_HEARD}, "the episodes are to cover all cases"


def test_quadrature_has_converged() -> None:
    actions = np.where(np.arange(9) % 3 == 0, LISTEN, np.random.default_rng(0).integers(4, size=9))[:, None].repeat(8, axis=1)
    venv, state, _ = play({}, actions)
    config: Any = venv.world.config
    belief = RescueFilter(config)
    finer = RescueFilter(config, n_points=2 * belief.n_points)
    assert abs(belief.posterior(state).doors - finer.posterior(state).doors).mean() < 2e-4


def test_predictions_are_calibrated() -> None:
    rng = np.random.default_rng(0)
    actions = np.where(rng.random((25, 400)) < 0.1, LISTEN, rng.integers(4, size=(25, 400)))
    venv, state, _ = play(SMALL, actions, seed=7)
    world: Any = venv.world
    predicted = RescueFilter(world.config).posterior(state).doors[..., 1:]
    truth = np.zeros_like(predicted)
    for e, is_victim in enumerate(world.is_victim):
        rows = np.flatnonzero(world.doors[:, e] >= 0)
        truth[rows, world.doors[rows, e], 0 if is_victim else 1] = 1
    for low, high in itertools.pairwise((0, 1e-3, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 1 - 1e-9)):
        inside = (predicted > low) & (predicted <= high)
        p, n_found = predicted[inside], truth[inside].sum()
        assert p.size > 20
        assert abs(n_found - p.sum()) < 4 * math.sqrt((p * (1 - p)).sum()) + 1
    np.testing.assert_array_equal(truth[predicted > 1 - 1e-9], 1)


def context(doors: list[int], grid_size: int) -> Rescue:
    return Rescue(np.array(doors), door_centres(grid_size)[doors])


def test_rescued_victim_is_identified_by_its_silence() -> None:
    actions = np.array([UP, UP, LISTEN])[:, None]
    places = [context([1, 4, 9], 3)]  # the first victim is behind the middle door of the upper edge
    _, unheard, _ = play(TINY, actions[:2], contexts=places)
    _, heard, _ = play(TINY, actions, contexts=places)
    belief = RescueFilter(SearchAndRescueConfig(**TINY))
    np.testing.assert_allclose(belief.posterior(unheard).entities[0, :, 1], [0.5, 0.5, 0], atol=1e-9)
    np.testing.assert_allclose(belief.posterior(heard).entities[0, :, 1], [1, 0, 0], atol=1e-9)
    np.testing.assert_allclose(belief.posterior(heard).doors[0, 1], [1, 0, 0], atol=1e-9)


@pytest.mark.parametrize(("doors", "expected"), [([4, 5, 1], [0, 0, 1]), ([4, 5, 9], [1, 0, 0])])
def test_hazards_and_empty_doors_are_remembered(doors: list[int], expected: list[float]) -> None:
    _, state, _ = play(TINY, np.array([UP, UP])[:, None], contexts=[context(doors, 3)])
    posterior = RescueFilter(SearchAndRescueConfig(**TINY)).posterior(state)
    np.testing.assert_allclose(posterior.doors[0, 1], expected, atol=1e-9)
    np.testing.assert_allclose(posterior.entities.sum(axis=2), 1, atol=1e-9)


def test_without_rewards_silence_still_tells_of_a_rescue() -> None:
    belief = RescueFilter(SearchAndRescueConfig(**TINY))
    _, _, (history,) = play(TINY, np.array([UP, UP, LISTEN])[:, None], contexts=[context([1, 4, 9], 3)])
    state = belief.initial(1)
    for step in history:
        state = belief.update(state, step.observation[None], np.array([step.action]), np.array([np.nan]))
    assert state.doors[0, 1] == Door.OPENED_HEARD
    np.testing.assert_allclose(belief.posterior(state).entities[0, :, 1], [1, 0, 0], atol=1e-9)


def test_opening_a_known_door_again_changes_nothing() -> None:
    _, once, _ = play(TINY, np.array([UP, UP])[:, None], contexts=[context([1, 4, 9], 3)])
    _, twice, _ = play(TINY, np.array([UP, UP, UP])[:, None], contexts=[context([1, 4, 9], 3)])
    np.testing.assert_array_equal(once.doors, twice.doors)


def test_noiseless_hearing_finds_everybody() -> None:
    actions = np.array([LISTEN, RIGHT, LISTEN, UP, LISTEN, LEFT, LEFT, LISTEN])[:, None].repeat(30, axis=1)
    venv, state, _ = play(SMALL | {"sigma_noise": 0.0}, actions)
    world: Any = venv.world
    entities = RescueFilter(world.config).posterior(state).entities
    assert (np.take_along_axis(entities, world.doors[..., None], axis=2) > 0.5).mean() > 0.98


def test_shortest_tours_are_shortest() -> None:
    places = np.random.default_rng(0).integers(-3, 4, size=(10, 5, 2))
    starts, steps = abs(places).sum(axis=-1), abs(places[:, :, None] - places[:, None]).sum(axis=-1)

    def length(i: int, tour: tuple[int, ...]) -> int:
        return starts[i, tour[0]] + sum(steps[i, a, b] for a, b in itertools.pairwise(tour))

    for i, tour in enumerate(shortest_tours(starts, steps)):
        assert length(i, tuple(tour)) == min(length(i, order) for order in itertools.permutations(range(5)))


def vec_envs(**kwargs: Any) -> list[VecEnv]:
    single: list[Callable[[], gym.Env]] = [lambda: Monitor(SearchAndRescueEnv(**kwargs)) for _ in range(3)]
    return [VecMonitor(SearchAndRescueVecEnv(8, seed=0, **kwargs)), VecPreviousReward(DummyVecEnv(single))]


@pytest.mark.parametrize(
    "kwargs", [{}, SMALL, {"n_victims": 9, "n_hazards": 3}, {"n_victims": 0}, {"grid_size": 1, "n_victims": 2, "n_hazards": 2}]
)
def test_knows_the_map_rescues_everybody(kwargs: dict[str, Any]) -> None:
    for venv in vec_envs(**kwargs):
        agent = KnowsTheMap(venv)
        returns, lengths = sb3_evaluate_policy(agent, venv, n_eval_episodes=20, return_episode_rewards=True, warn=False)
        assert returns == [10.0 * agent.config.n_victims] * 20
        assert lengths == [agent.config.n_steps] * 20


def test_knows_the_map_takes_a_single_environment() -> None:
    env = SearchAndRescueEnv(**SMALL)
    assert evaluate_policy(KnowsTheMap(env), env, n_eval_episodes=3, warn=False) == (30.0, 0.0)


@pytest.mark.parametrize("grid_size", [3, 5, 7])
def test_never_opens_has_a_return_of_zero(grid_size: int) -> None:
    config = SearchAndRescueConfig(grid_size=grid_size, n_hazards=4)
    venv = SearchAndRescueVecEnv(8, seed=0, grid_size=grid_size, n_hazards=4)
    assert evaluate_policy(NeverOpens(config), venv, n_eval_episodes=8, warn=False) == (0.0, 0.0)


def test_random_agent_is_uniform_and_seeded() -> None:
    config = SearchAndRescueConfig()
    observations = np.zeros((5000, 14), dtype=np.float32)
    actions, _ = RandomAgent(config, seed=1).predict(observations)
    again, _ = RandomAgent(config, seed=1).predict(observations)
    np.testing.assert_array_equal(actions, again)
    np.testing.assert_allclose(np.bincount(actions, minlength=5) / 5000, 0.2, atol=0.03)


def test_single_and_batched_predictions_agree() -> None:
    kwargs: dict[str, Any] = SMALL | {"sigma_noise": 0.3}
    agent = BeliefAgent(SearchAndRescueConfig(**kwargs))
    venv = VecPreviousReward(SearchAndRescueVecEnv(3, seed=5, **kwargs))
    batch: Any = venv.reset()
    state: Any = None
    alone: list[Any] = [None] * 3
    starts, seen = np.ones(3, dtype=bool), set()
    for _ in range(60):
        actions, state = agent.predict(batch, state, starts)
        for i in range(3):
            row = attach_reward(np.asarray(batch)[i : i + 1], batch.reward[i : i + 1])
            action, alone[i] = agent.predict(row, alone[i], starts[i : i + 1])
            assert action == actions[i]
        seen |= set(actions)
        batch, _, starts, _ = venv.step(actions)
    assert seen == set(range(5))


def test_posterior_of_no_episodes() -> None:
    rescue_filter = RescueFilter(SearchAndRescueConfig(grid_size=3, n_victims=1, n_hazards=2))
    posterior = rescue_filter.posterior(rescue_filter.initial(0))
    assert (posterior.entities.shape, posterior.doors.shape) == ((0, 3, 12), (0, 12, 3))


def test_posterior_of_the_agent() -> None:
    config = SearchAndRescueConfig(**SMALL)
    agent = BeliefAgent(config)
    venv = VecPreviousReward(SearchAndRescueVecEnv(4, seed=0, **SMALL))
    _, state = agent.predict(venv.reset())
    doors = agent.door_posterior(state)
    assert agent.entity_posterior(state).shape == (4, 8, 20)
    assert doors.shape == (4, 20, 3)
    np.testing.assert_allclose(doors, np.broadcast_to([12 / 20, 3 / 20, 5 / 20], doors.shape), atol=1e-9)


def mean_return(evaluate: Any, n_episodes: int, **kwargs: Any) -> float:
    venv = SearchAndRescueVecEnv(n_episodes, seed=0, **kwargs)
    return evaluate(BeliefAgent(SearchAndRescueConfig(**kwargs)), venv, n_eval_episodes=n_episodes, warn=False)[0]


def test_belief_agent_is_near_the_upper_bound() -> None:
    assert 25.5 < mean_return(evaluate_policy, 100, **SMALL) < 30


def test_belief_agent_without_rewards_acts_on_hearing() -> None:
    with pytest.warns(UserWarning, match="carry none"):
        assert mean_return(sb3_evaluate_policy, 50, **SMALL) > 20


@pytest.mark.parametrize(
    ("kwargs", "least"),
    [
        ({"n_victims": 0, "n_hazards": 4}, 0.0),  # nothing to gain
        ({"n_victims": 4, "n_hazards": 0}, 40.0),  # nothing to lose: every door is opened, no listening is paid for
        ({"n_victims": 0, "n_hazards": 0}, 0.0),
        ({"grid_size": 1, "n_victims": 1, "n_hazards": 0}, 10.0),
        ({"grid_size": 1, "n_victims": 0, "n_hazards": 4}, -5.0),  # nothing but listening is left, five times
        ({"grid_size": 3, "n_victims": 2, "n_hazards": 2}, 15.0),
        ({"grid_size": 3, "n_victims": 2, "n_hazards": 2, "horizon": 1}, -1.0),
        ({"grid_size": 5, "n_victims": 6, "n_hazards": 10}, 35.0),  # too many entities for the exact programme
    ],
)
def test_belief_agent_elsewhere(kwargs: dict[str, int], least: float) -> None:
    assert least <= mean_return(evaluate_policy, 50, **kwargs) <= 10 * kwargs["n_victims"]
