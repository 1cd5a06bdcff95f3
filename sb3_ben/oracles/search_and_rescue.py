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
CHUNK = 32  # episodes that decide at once; the arrays over positions are large
LISTENING_CHUNK = 8  # episodes whose listening is considered at once, so that the arrays stay in the cache
NEGLIGIBLE = 0.002  # expected reward that is not worth a step or a thought, in units of the reward for a victim
STEP_PRICE = 0.0005  # what a step is worth in the same units: it costs nothing but time, so this only breaks near ties
DECIMALS = 4  # to which scores are compared: ties are broken alike whatever the rounding errors of a batch
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

    def _idle(self, positions: np.ndarray) -> np.ndarray:
        """Walk to and fro; on a grid of one cell, where every step opens a door, listen."""
        steps = np.where(positions[:, 0] < self.config.half, RIGHT, LEFT)
        return steps if self.config.half else np.full_like(steps, LISTEN)


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
        return self._idle(observations[:, :2]), state


class KnowsTheMap(RescueOracle):
    """Rescues every victim on the shortest tour, having looked up where they are.

    With the paper's rewards, and time enough for the tour, no agent gets more.

    :param env: the environment that it will act in, also under wrappers; it reads the contexts of new episodes there
    """

    def __init__(self, env: gym.Env | VecEnv) -> None:
        self.env = env
        super().__init__(self._worlds()[0].config)

    def _worlds(self) -> list[Any]:
        return self.env.get_attr("world") if isinstance(self.env, VecEnv) else [self.env.get_wrapper_attr("world")]

    def _initial_state(self, n_envs: int) -> OracleState:
        """The doors of the tour, how many of them have been opened, and the action that is opening the next."""
        tours = np.full((n_envs, self.config.n_victims), NO_DOOR)
        return tours, np.zeros(n_envs, dtype=np.int64), np.full(n_envs, NO_ACTION)

    def with_actions(self, state: OracleState, actions: np.ndarray) -> OracleState:
        tours, n_opened, opening = state
        missed = (opening != NO_ACTION) & (opening != actions)
        return tours, n_opened - missed, opening

    def _act(
        self, observations: np.ndarray, rewards: np.ndarray, state: OracleState, deterministic: bool
    ) -> tuple[np.ndarray, OracleState]:
        tours, n_opened, opening = state
        positions = observations[:, :2]
        if not self.config.n_victims:
            return self._idle(positions), state
        new = np.flatnonzero(tours[:, 0] == NO_DOOR)
        if new.size:
            tours[new] = self._plan(positions[new], new)
        # at the end of the tour it goes on opening the last door, behind which nobody is left
        doors = tours[np.arange(len(tours)), np.minimum(n_opened, self.config.n_victims - 1)]
        arrived = (positions == self.door_cells[doors]).all(axis=1)
        opening = np.where(arrived, self.door_actions[doors], NO_ACTION)
        return walk(positions, self.door_cells[doors], self.door_actions[doors]), (tours, n_opened + arrived, opening)

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
        posterior = readings[..., None] - means[:, :, None]  # one large array, worked on in place
        posterior *= (np.sqrt(0.5) / deviations)[:, :, None]
        np.square(posterior, out=posterior)
        np.exp(np.negative(posterior, out=posterior), out=posterior)
        posterior *= (doors[:, None] / deviations).astype(np.float32)[:, :, None]
        posterior /= posterior.sum(axis=3, keepdims=True)
        return posterior


class Plan(NamedTuple):
    """Where to go and what to do there, one row per episode."""

    cells: np.ndarray
    actions: np.ndarray


class Prospects(NamedTuple):
    """What there is to decide upon, one row per episode.

    :param values: expected reward of opening each door
    :param risks: the share of the hazards in it
    :param potential: what knowing everything would add to the value of opening the good doors
    :param away: number of steps to each door
    :param remaining: number of steps until the end of the episode
    """

    values: np.ndarray
    risks: np.ndarray
    potential: np.ndarray
    away: np.ndarray
    remaining: np.ndarray


class BeliefAgent(RescueOracle):
    """Acts on the exact posterior (:class:`~sb3_ben.oracles.rescue_filter.RescueFilter`) and looks one decision ahead.

    A door is worth opening when its expected reward is positive. Listening is worth it when its price is less than the expected
    increase of the sum of these positive parts, for the best place and number of listens; the expectation is over hypothetical
    readings drawn from the posterior. While listening pays, only doors about which it would tell nothing new are opened.

    :param config: the arguments of the environment
    :param seed: seed of the draws that every lookahead uses
    """

    needs_reward = True
    action_entry = 4

    def __init__(self, config: SearchAndRescueConfig, seed: int | None = 0) -> None:
        super().__init__(config, seed)
        self.filter = RescueFilter(config)
        self.listening = Listening(self.filter, self.rng)
        self.negligible = NEGLIGIBLE * abs(config.reward_victim)
        self.step_price = STEP_PRICE * abs(config.reward_victim)

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
        before, (last, elapsed, *planned) = FilterState(*state[:4]), state[4:]
        belief, plan = self.filter.update(before, observations, last, rewards), Plan(*planned)
        learnt = (last == LISTEN) | (self.filter.opened_door(before.position, last) != NO_DOOR)
        rows, starts = np.flatnonzero(learnt), np.flatnonzero(last == NO_ACTION)
        if rows.size:
            plan.cells[rows], plan.actions[rows] = self._plan(_take(belief, rows), elapsed[rows])
        if starts.size:  # all episodes start alike: one decision serves them all
            plan.cells[starts], plan.actions[starts] = self._plan(_take(belief, starts[:1]), elapsed[starts[:1]])
        actions = walk(belief.position, *plan)
        return actions, (*belief, actions, elapsed + 1, *plan)

    def _plan(self, belief: FilterState, elapsed: np.ndarray) -> Plan:
        plans = [self._decide(_take(belief, rows), elapsed[rows]) for rows in chunks(len(elapsed), CHUNK)]
        return Plan(*(np.concatenate(parts) for parts in zip(*plans, strict=True)))

    def _decide(self, belief: FilterState, elapsed: np.ndarray) -> Plan:
        """Open the safest of the doors that are ready to be opened, else listen if that is worth it, else do nothing."""
        likelihoods = self.filter.position_likelihoods(belief.heard)
        posterior = self.filter.combine(belief, self.filter.door_likelihoods(likelihoods))
        prospects = self._prospects(belief, posterior, self.config.n_steps - elapsed)
        cells, pays, gains = self._consider_listening(belief, posterior, prospects, likelihoods)
        openable = np.logical_and(prospects.values > self.negligible, prospects.away < prospects.remaining[:, None])
        ready = openable & (~pays[:, None] | (gains < self.negligible))
        costs = (prospects.risks + self.step_price * prospects.away).round(DECIMALS)
        costs = np.where(ready, costs, np.inf)
        door, opens = costs.argmin(axis=1), np.isfinite(costs.min(axis=1))
        cells = np.where(pays[:, None], cells, belief.position)
        actions = np.where(pays, LISTEN, self._idle_with(prospects.values, belief.position))
        return Plan(np.where(opens[:, None], self.door_cells[door], cells), np.where(opens, self.door_actions[door], actions))

    def _prospects(self, belief: FilterState, posterior: Posterior, remaining: np.ndarray) -> Prospects:
        rewards = np.array([0.0, self.config.reward_victim, self.config.reward_hazard])
        values = posterior.doors @ rewards
        potential = (posterior.doors @ np.maximum(rewards, 0) - np.maximum(values, 0)).sum(axis=1)
        away = distances(belief.position[:, None], self.door_cells)
        return Prospects(values, posterior.doors[..., 2] * abs(self.config.reward_hazard), potential, away, remaining)

    def _consider_listening(
        self, belief: FilterState, posterior: Posterior, prospects: Prospects, likelihoods: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where to listen best, whether it pays, and what is gained by it at each door."""
        cells = belief.position.copy()
        pays = (prospects.potential > -self.config.reward_listen) & (prospects.remaining > 2 * self.config.grid_size)
        gains = prospects.risks.copy()  # no listening can gain more at a good door, so the safest need no closer look
        safe = (prospects.values > self.negligible) & (prospects.risks < self.negligible)
        unclear = np.flatnonzero(pays & ~safe.any(axis=1))
        for part in chunks(len(unclear), LISTENING_CHUNK) if unclear.size else []:
            rows = unclear[part]
            now = np.maximum(prospects.values[rows], 0)[:, None]
            later = self.listening.door_values(likelihoods[rows], posterior.entities[rows])
            gained = np.where(belief.doors[rows, None] == Door.UNOPENED, later - now, 0)
            walks = self.step_price * distances(belief.position[rows, None], self.listening.cells)
            profits = (gained.sum(axis=2) - self.listening.prices - walks).round(DECIMALS)
            best = profits.argmax(axis=1)
            cells[rows], pays[rows] = self.listening.cells[best], profits.max(axis=1) > 0
            gains[rows] = gained[np.arange(len(rows)), best]
        return cells, pays, gains

    def _idle_with(self, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Do nothing; on a grid of one cell, where this is impossible, do what costs least."""
        if self.config.half:
            return self._idle(positions)
        options = np.column_stack((values, np.full(len(values), self.config.reward_listen)))
        return np.append(self.door_actions, LISTEN)[options.argmax(axis=1)]


def _take(belief: FilterState, rows: np.ndarray | slice) -> FilterState:
    return FilterState(*(array[rows] for array in belief))
