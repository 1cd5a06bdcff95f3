"""Agents that know how search and rescue works: one that is told the map, one that infers it, and two that ignore it."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_ben.envs.search_and_rescue import DOWN, LEFT, LISTEN, NO_DOOR, RIGHT, UP, SearchAndRescueConfig, door_cells
from sb3_ben.oracles.base import Oracle, OracleState
from sb3_ben.oracles.rescue_filter import Door, FilterState, Posterior, RescueFilter, chunks, outer

__all__ = ["BeliefAgent", "KnowsTheMap", "NeverOpens", "RandomAgent", "shortest_tours"]

MAX_EXACT_TOUR = 8  # doors; beyond, the tour goes to the nearest door
N_WORLDS = 32  # hypothetical outcomes of a listen
N_LINES = 5  # rows and columns of the grid on which listening is considered
REPEATS = (1, 2, 4)  # how many listens in a row are considered
CHUNK = 32  # episodes that decide at once, so that the arrays stay in the cache
UNPLANNED = -2
NO_ACTION = -1


def walk(position: np.ndarray, cells: np.ndarray, arrived: np.ndarray) -> np.ndarray:
    """One step from each position towards each cell, or the action ``arrived`` for those who are there."""
    dx, dy = (cells - position).T
    conditions, moves = [dx > 0, dx < 0, dy > 0, dy < 0], [RIGHT, LEFT, UP, DOWN]
    return np.select(conditions, moves, arrived)


def distances(from_cells: np.ndarray, to_cells: np.ndarray) -> np.ndarray:
    """Number of steps between cells."""
    return np.abs(from_cells - to_cells).sum(axis=-1)


def _nearest_tours(starts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Tours that always go on to the nearest place; arguments as for :func:`shortest_tours`."""
    rows, tour, here = np.arange(len(starts)), [], starts
    visited = np.zeros(starts.shape, dtype=bool)
    for _ in range(starts.shape[1]):
        chosen = np.where(visited, np.inf, here).argmin(axis=1)
        visited[rows, chosen] = True
        here = steps[rows, chosen]
        tour.append(chosen)
    return np.stack(tour, axis=1)


def shortest_tours(starts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The orders in which to visit n places on the shortest way (Held and Karp, 1962), for a batch of problems.

    :param starts: distance of each place from the start, ``(n_batch, n)``
    :param steps: distances between the places, ``(n_batch, n, n)``
    :return: the places in the order of the visits, ``(n_batch, n)``
    """
    n_batch, n = starts.shape
    if n > MAX_EXACT_TOUR or n == 0:
        return _nearest_tours(starts, steps) if n else np.zeros((n_batch, 0), dtype=np.int64)
    lengths = np.full((2**n, n, n_batch), np.inf)  # of the shortest way through a set of places that ends at one of them
    previous = np.zeros((2**n, n, n_batch), dtype=np.int64)
    for visited in range(1, 2**n):
        for last in (place for place in range(n) if visited >> place & 1):
            before = visited ^ (1 << last)
            ways = lengths[before] + steps[:, :, last].T
            previous[visited, last] = ways.argmin(axis=0)
            lengths[visited, last] = ways.min(axis=0) if before else starts[:, last]
    return _backtrack(lengths[-1].argmin(axis=0), previous)


def _backtrack(last: np.ndarray, previous: np.ndarray) -> np.ndarray:
    n_sets, n, n_batch = previous.shape
    visited, tour = np.full(n_batch, n_sets - 1), [last]
    for _ in range(n - 1):
        before = previous[visited, tour[-1], np.arange(n_batch)]
        visited = visited ^ (1 << tour[-1])
        tour.append(before)
    return np.stack(tour[::-1], axis=1)


class RescueOracle(Oracle[SearchAndRescueConfig]):
    """What the agents of search and rescue share.

    :param config: the arguments of the environment
    :param seed: seed of the agent's own draws
    """

    def __init__(self, config: SearchAndRescueConfig, seed: int | None = None) -> None:
        super().__init__(config, seed)
        self.observation_shape = (2 + config.n_entities,)
        self.door_cells, self.door_actions = door_cells(config.grid_size)


class RandomAgent(RescueOracle):
    """Takes every action with the same probability."""

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        return self.rng.integers(LISTEN + 1, size=len(observations)), state


class NeverOpens(RescueOracle):
    """Walks to and fro: its return is 0, except on the grid of one cell, which leaves nothing but to listen."""

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        moves = np.where(observations[:, 0] < self.config.half, RIGHT, LEFT)
        return (moves if self.config.half else np.full(len(observations), LISTEN)), state


class KnowsTheMap(RescueOracle):
    """Rescues every victim on the shortest tour, having looked up where they are: the upper bound of the return.

    :param env: the environment that it will act in, also under wrappers; it reads the contexts of new episodes there
    """

    def __init__(self, env: gym.Env | VecEnv) -> None:
        self.env = env
        super().__init__(self._worlds()[0].config)

    def _worlds(self) -> list[Any]:
        return self.env.get_attr("world") if isinstance(self.env, VecEnv) else [self.env.get_wrapper_attr("world")]

    def _initial_state(self, n_envs: int) -> OracleState:
        """The doors of the tour, and how many of them have been opened."""
        return np.full((n_envs, self.config.n_victims), UNPLANNED), np.zeros(n_envs, dtype=np.int64)

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        tours, n_opened = state
        new = np.flatnonzero((tours == UNPLANNED).any(axis=1))
        if new.size:
            tours[new] = self._plan(observations[new, :2], new)
        idle = np.where(observations[:, 0] < self.config.half, RIGHT, LEFT)
        if not self.config.n_victims:
            return idle, state
        doors = tours[np.arange(len(tours)), np.minimum(n_opened, self.config.n_victims - 1)]
        opens = distances(observations[:, :2], self.door_cells[doors]) == 0
        actions = walk(observations[:, :2], self.door_cells[doors], self.door_actions[doors])
        finished = n_opened == self.config.n_victims
        return np.where(finished, idle, actions), (tours, n_opened + (opens & ~finished))

    def _plan(self, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """The doors of the victims in the order of the shortest tours."""
        worlds = self._worlds()
        contexts = [worlds[i].contexts[i % worlds[i].n_envs] for i in slots]
        doors = np.stack([context.doors[: self.config.n_victims] for context in contexts])
        cells = self.door_cells[doors]
        order = shortest_tours(distances(positions[:, None], cells), distances(cells[:, :, None], cells[:, None]))
        return np.take_along_axis(doors, order, axis=1)


class Listening:
    """The value of listening, from hypothetical readings.

    An option is a cell and a number of listens there. Given its door, the mean log reading of an entity is taken as normal, with
    the moments that follow from the posterior over positions.

    :param belief: the filter whose posterior is to be improved by listening
    :param rng: source of the draws, which all lookaheads share: decisions are a function of the belief
    """

    def __init__(self, belief: RescueFilter, rng: np.random.Generator) -> None:
        config = belief.config
        self.filter = belief
        lines = np.linspace(-config.half, config.half, min(config.grid_size, N_LINES)).round()
        cells = np.stack(np.meshgrid(lines, lines), axis=-1).reshape(-1, 2)
        self.cells, self.n_listens = np.tile(cells, (len(REPEATS), 1)), np.repeat(REPEATS, len(cells))
        self.prices = -config.reward_listen * self.n_listens
        self.values = np.where(belief.world.is_victim, config.reward_victim, config.reward_hazard)
        strata = (np.arange(N_WORLDS) + 0.5) / N_WORLDS
        shuffled = rng.permuted(np.tile(strata, (2, config.n_entities, 1)), axis=2)
        self.uniforms = shuffled[0]
        self.normals = np.vectorize(NormalDist().inv_cdf, otypes=[np.float32])(shuffled[1])

    def door_values(self, likelihoods: np.ndarray, entities: np.ndarray) -> np.ndarray:
        """What the right to open each door will be worth after listening, in expectation, ``(n_envs, n_options, n_doors)``.

        :param likelihoods: of the positions of the entities, as the filter gives them
        :param entities: the posterior over the doors of the entities
        """
        means, deviations = self._predict(likelihoods)
        later = np.zeros((len(entities), len(self.cells), N_WORLDS, entities.shape[2]), dtype=np.float32)
        for e, value in enumerate(self.values):
            later += np.float32(value) * self._hypothetical(e, entities[:, e], means[:, e], deviations[:, e])
        # the mean of what a door is worth later is what it is worth now: this takes the noise off doors whose sign is certain
        surplus = later.mean(axis=2) - np.einsum("ned,e->nd", entities, self.values)[:, None]
        return np.maximum(later, 0).mean(axis=2) - (later > 0).mean(axis=2) * surplus

    def _predict(self, likelihoods: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of the mean log readings, ``(n_envs, n_entities, n_options, n_doors)``."""
        moments = self.filter.position_moments(likelihoods)
        features = self.filter.listening_features(self.cells)
        means = -moments[..., 0, :] @ features.T
        squares = moments.reshape(*moments.shape[:-2], 16) @ outer(features).reshape(-1, 16).T
        variances = np.maximum(squares - means**2, 0) + self.filter.sigma**2 / self.n_listens
        return means.swapaxes(2, 3).astype(np.float32), np.sqrt(variances).swapaxes(2, 3).astype(np.float32)

    def _hypothetical(self, e: int, doors: np.ndarray, means: np.ndarray, deviations: np.ndarray) -> np.ndarray:
        """Posteriors of one entity after hypothetical readings, ``(n_envs, n_options, n_worlds, n_doors)``."""
        drawn = (doors.cumsum(axis=1)[:, None] < self.uniforms[e, :, None]).sum(axis=2)
        drawn = np.minimum(drawn, doors.shape[1] - 1)[:, None].repeat(len(self.cells), axis=1)
        readings = np.take_along_axis(means, drawn, axis=2) + np.take_along_axis(deviations, drawn, axis=2) * self.normals[e]
        scores = (readings[..., None] - means[:, :, None]) / deviations[:, :, None]
        posterior = np.exp(-0.5 * scores**2) * (doors[:, None] / deviations).astype(np.float32)[:, :, None]
        return posterior / posterior.sum(axis=3, keepdims=True)


class Plan(NamedTuple):
    """Where to go and what to do there, one row per episode."""

    cells: np.ndarray
    actions: np.ndarray


class BeliefAgent(RescueOracle):
    """Acts on the exact posterior (:class:`~sb3_ben.oracles.rescue_filter.RescueFilter`) and looks one decision ahead.

    A door is worth opening when its expected reward is positive. Listening is worth it when its price is less than the expected
    increase of the sum of these positive parts, for the best place and number of listens; the expectation is over hypothetical
    readings drawn from the posterior. While listening pays, only doors about which it would tell nothing new are opened.

    :param config: the arguments of the environment
    :param seed: seed of the draws that every lookahead uses
    """

    needs_reward = True

    def __init__(self, config: SearchAndRescueConfig, seed: int | None = 0) -> None:
        super().__init__(config, seed)
        self.filter = RescueFilter(config)
        self.listening = Listening(self.filter, self.rng)

    def posterior(self, state: OracleState) -> Posterior:
        """What the agent believes, from the state that ``predict`` returned."""
        return self.filter.posterior(FilterState(*state[:4]))

    def door_posterior(self, state: OracleState) -> np.ndarray:
        """Probability that nothing, a victim, a hazard is behind each door now, ``(n_envs, n_doors, 3)``."""
        return self.posterior(state).doors

    def entity_posterior(self, state: OracleState) -> np.ndarray:
        """Probability that each entity was placed behind each door, ``(n_envs, n_entities, n_doors)``."""
        return self.posterior(state).entities

    def _initial_state(self, n_envs: int) -> OracleState:
        """The filter's state, the last action, the number of steps taken, and the cells and actions of the plan."""
        counts = np.full(n_envs, NO_ACTION), np.zeros(n_envs, dtype=np.int64)
        return *self.filter.initial(n_envs), *counts, np.zeros((n_envs, 2)), np.full(n_envs, NO_ACTION)

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        before, (last, elapsed, *plan) = FilterState(*state[:4]), state[4:]
        belief = self.filter.update(before, observations, last, rewards)
        learnt = (last == LISTEN) | (self.filter.opened_door(before.position, last) != NO_DOOR)
        self._replan(plan, belief, elapsed, np.flatnonzero(learnt & (elapsed > 0)))
        self._replan(plan, belief, elapsed, np.flatnonzero(elapsed == 0), same=True)
        actions = walk(belief.position, *plan)
        return actions, (*belief, actions, elapsed + 1, *plan)

    def _replan(self, plan: list[np.ndarray], belief: FilterState, elapsed: np.ndarray, rows: np.ndarray, same: bool = False) -> None:
        """Put new plans into some rows; if the rows are the same, one decision is enough for all of them."""
        for part in chunks(1 if same else len(rows), CHUNK):
            chosen = rows[:1] if same else rows[part]
            if chosen.size:
                cells, actions = self._decide(FilterState(*(array[chosen] for array in belief)), elapsed[chosen])
                plan[0][rows if same else chosen], plan[1][rows if same else chosen] = cells, actions

    def _decide(self, belief: FilterState, elapsed: np.ndarray) -> Plan:
        """Where to go, and which door to open there or whether to listen."""
        likelihoods = self.filter.position_likelihoods(belief.heard)
        posterior = self.filter.combine(belief, self.filter.door_likelihoods(likelihoods))
        values = posterior.doors @ np.array([0.0, self.config.reward_victim, self.config.reward_hazard])
        risks = posterior.doors[..., 2] * abs(self.config.reward_hazard)
        away = distances(belief.position[:, None], self.door_cells)
        remaining = self.config.n_steps - elapsed[:, None]
        openable = (values > MIN_GAIN) & (away < remaining)
        safe = openable & (risks < REGRET)
        perfect = np.einsum("ned,e,nd->n", posterior.entities, np.maximum(self.listening.values, 0), belief.doors == Door.UNOPENED)
        promising = perfect - np.maximum(values, 0).sum(axis=1) > -self.config.reward_listen
        look = np.flatnonzero(promising & ~safe.any(axis=1) & (remaining[:, 0] > 2 * self.config.grid_size))
        n = len(values)
        worth = np.zeros(n, bool); cell = np.zeros((n, 2)); dv = np.zeros_like(values)
        if look.size:
            now = np.maximum(values[look], 0)
            v = self.listening.door_values(likelihoods[look], posterior.entities[look])
            gains = np.where(belief.doors[look, None] == Door.UNOPENED, v - now[:, None], 0)
            prof = gains.sum(axis=2) - self.listening.prices - 1e-3 * distances(belief.position[look, None], self.listening.cells)
            i = prof.argmax(axis=1); r = np.arange(len(i))
            worth[look] = prof[r, i] > MARGIN
            cell[look] = self.listening.cells[i]
            dv[look] = gains[r, i]
        free = openable & np.where(safe.any(axis=1)[:, None], safe, ~worth[:, None] | (dv < REGRET))
        score = np.where(free, -risks - LAMBDA * away, -np.inf)
        d = score.argmax(axis=1)
        opens = free.any(axis=1)
        cells = np.where(opens[:, None], self.door_cells[d], np.where(worth[:, None], cell, belief.position))
        idle = np.where(belief.position[:, 0] < self.config.half, RIGHT, LEFT)
        actions = np.where(opens, self.door_actions[d], np.where(worth, LISTEN, idle))
        return Plan(cells, actions)
MARGIN=0.; MIN_GAIN=0.01; REGRET=0.02; LAMBDA=0.01
