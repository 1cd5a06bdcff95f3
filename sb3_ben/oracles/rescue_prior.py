"""What is known about search and rescue before the first step, as parts of a :class:`~sb3_ben.priors.Prior`."""

from __future__ import annotations

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_ben.envs.search_and_rescue import DIRECTIONS, LISTEN, NO_DOOR, SearchAndRescueConfig, door_cells
from sb3_ben.oracles.rescue_filter import FilterState, RescueFilter
from sb3_ben.priors import BeliefState, Prior, Transitions

__all__ = ["RescueBelief", "RescueTransitions", "config_of", "exact_filter"]

MAX_LISTENS = 4  # listens at one place that are told apart
MAX_VISITS = 4  # visits of one place since the last news that are told apart
FAR, NEAR = 0.95, 0.8  # by how much promises fade with every step: such that far doors count, and such that near ones stand out


def config_of(env: VecEnv) -> SearchAndRescueConfig:
    """The arguments of search and rescue environments."""
    config = env.get_attr("world", [0])[0].config
    if not isinstance(config, SearchAndRescueConfig):
        raise ValueError(f"This prior is one for search and rescue, the environment has {config!r}")
    return config


def exact_filter(env: VecEnv, n_points: int | None = 8) -> Prior:
    """The exact filter as a belief, for ``BEN(prior=exact_filter)``.

    :param env: search and rescue environments
    :param n_points: as for :class:`RescueBelief`; a few are enough to act on
    """
    return Prior(belief=RescueBelief(config_of(env), n_points))


class RescueBelief:
    """The exact filter of search and rescue as a belief: what the doors promise, seen from where the agent stands.

    A door promises a gain (its expected reward, if that is positive) and information (the gain if one knew what is behind it,
    less that). Both fade with the distance. The features are, for the four cells around the agent and its own: the sum and the
    maximum over all doors of these promises as they arrive in that cell, how often the agent listened there, and how often it was
    there since it last learned anything (or an error of Q would have it walk to and fro for ever); for the four moves: whether it
    opens a door, and that door's expected reward; the totals; and the place. All are in units of the reward for a victim, or of a
    size of about one. What is left out is where exactly an entity is thought to be in the square behind its door, and the time:
    the end of an episode is a time limit.

    It knows what reward to expect of each action, so that no sample of b is spoilt by a hazard that was unlikely.

    :param config: the arguments of the environment
    :param n_points: quadrature points per side of a square, as for :class:`~sb3_ben.oracles.rescue_filter.RescueFilter`
    """

    def __init__(self, config: SearchAndRescueConfig, n_points: int | None = None) -> None:
        self.config = config
        self.filter = RescueFilter(config, n_points)
        along = np.arange(-config.half, config.half + 1)
        self.cells = np.stack(np.meshgrid(along, along, indexing="ij"), axis=-1).reshape(-1, 2)
        steps = 1 + np.abs(self.cells[:, None] - door_cells(config.grid_size)[0]).sum(axis=-1)
        self.far, self.near = FAR**steps, NEAR**steps
        self.around = self._cell(np.clip(self.cells[:, None] + DIRECTIONS, -config.half, config.half))
        self.size = 5 * 8 + 2 * 4 + 5 + len(self.cells)
        self.unit = abs(config.reward_victim) or 1.0
        self._prior = self._probabilities(self.filter.initial(1))

    def initial(self, n_envs: int) -> BeliefState:
        """The filter's state, the probabilities of a victim and of a hazard at each door, and listens and visits at each cell."""
        counts = np.zeros((2, n_envs, len(self.cells)))
        return (*self.filter.initial(n_envs), self._prior.repeat(n_envs, axis=0), *counts)

    def update(
        self, state: BeliefState, observations: np.ndarray, previous_actions: np.ndarray, previous_rewards: np.ndarray
    ) -> BeliefState:
        before, probabilities, listens, visits = FilterState(*state[:4]), *state[4:]
        after = self.filter.update(before, observations, previous_actions, previous_rewards)
        listened = previous_actions == LISTEN
        is_news = listened | (after.doors != before.doors).any(axis=1)
        news = np.flatnonzero(is_news)  # moves and doors opened again tell nothing, and the posterior is what costs time
        if news.size:
            probabilities = probabilities.copy()
            probabilities[news] = self._probabilities(FilterState(*(part[news] for part in after)))
        place = self._cell(after.position)[:, None] == np.arange(len(self.cells))
        visits = np.where(is_news[:, None], 0, visits) + place
        return (*after, probabilities, listens + (place & listened[:, None]), visits)

    def features(self, state: BeliefState) -> np.ndarray:
        position, (probabilities, listens, visits) = state[0], state[4:]
        values = self._door_values(probabilities) / self.unit
        gains = np.maximum(values, 0)
        information = np.maximum(probabilities[..., 0] * self.config.reward_victim / self.unit - gains, 0)
        cell = self._cell(position)
        around = self.around[cell]
        counts = ((listens, MAX_LISTENS), (visits, MAX_VISITS))
        parts = [np.minimum(np.take_along_axis(count, around, axis=1) / most, 1) for count, most in counts]
        for fading, promises in ((self.far, gains), (self.far, information), (self.near, gains)):
            arriving = fading[around] * promises[:, None]
            parts += [arriving.sum(axis=-1) / 2, arriving.max(axis=-1)]
        opened = self._opened(position)
        parts += [_at_doors(np.clip(values, -1, 1), opened), opened != NO_DOOR]
        totals = (gains.sum(axis=1) / 3, information.sum(axis=1) / 3, gains.max(axis=1), information.max(axis=1))
        parts.append(np.stack((*totals, np.minimum(listens.sum(axis=1) / (2 * MAX_LISTENS), 1)), axis=1))
        parts.append(cell[:, None] == np.arange(len(self.cells)))
        return np.concatenate(parts, axis=1, dtype=np.float32, casting="unsafe")

    def rewards(self, state: BeliefState) -> np.ndarray:
        """The expected reward of each action: of the door it opens, if any, or of listening."""
        position, probabilities = state[0], state[4]
        listening = np.full((len(position), 1), self.config.reward_listen)
        return np.concatenate((_at_doors(self._door_values(probabilities), self._opened(position)), listening), axis=1)

    def _door_values(self, probabilities: np.ndarray) -> np.ndarray:
        """The expected reward of opening each door."""
        return probabilities @ np.array([self.config.reward_victim, self.config.reward_hazard])

    def _opened(self, position: np.ndarray) -> np.ndarray:
        """The doors that the four moves open, ``(n_envs, 4)``."""
        moves = [self.filter.opened_door(position, np.full(len(position), move)) for move in range(LISTEN)]
        return np.stack(moves, axis=1)

    def _probabilities(self, state: FilterState) -> np.ndarray:
        return self.filter.posterior(state).doors[..., 1:]

    def _cell(self, position: np.ndarray) -> np.ndarray:
        place = position.astype(int) + self.config.half
        return place[..., 0] * self.config.grid_size + place[..., 1]


def _at_doors(values: np.ndarray, doors: np.ndarray) -> np.ndarray:
    """The values ``(n, n_doors)`` of some doors ``(n, k)``, 0 for ``NO_DOOR``."""
    return np.where(doors == NO_DOOR, 0.0, np.take_along_axis(values, np.maximum(doors, 0), axis=1))


class RescueTransitions:
    """The paper's weak prior: moves inside of the grid are certain and free, and a door opened blindly has an average reward.

    All of it holds before the first listen, when the readings are 0.

    :param config: the arguments of the environment
    :param door_share: share of doors among the samples
    :param seed: seed of the draws
    """

    def __init__(self, config: SearchAndRescueConfig, door_share: float = 0.5, seed: int | None = None) -> None:
        self.config, self.door_share = config, door_share
        self.rng = np.random.default_rng(seed)
        self.cells, self.actions = door_cells(config.grid_size)
        self.inner = max(config.half - 1, 0)
        #: the expected reward of opening any door blindly, -27.1 for the default arguments
        self.blind_reward = (config.n_victims * config.reward_victim + config.n_hazards * config.reward_hazard) / config.n_doors

    def __call__(self, n: int) -> Transitions:
        opens = self.rng.random(n) < self.door_share if self.config.half else np.ones(n, dtype=bool)
        door = self.rng.integers(self.config.n_doors, size=n)
        inside = self.rng.integers(-self.inner, self.inner + 1, size=(n, 2))
        positions = np.where(opens[:, None], self.cells[door], inside)
        actions = np.where(opens, self.actions[door], self.rng.integers(LISTEN, size=n))
        observations = np.zeros((n, 2 + self.config.n_entities), dtype=np.float32)
        observations[:, :2] = positions
        after = observations.copy()
        after[:, :2] += np.where(opens[:, None], 0, DIRECTIONS[actions])
        rewards, ends = np.where(opens, self.blind_reward, 0.0), np.zeros(n, dtype=bool)
        return Transitions(observations, actions, rewards, after, ends, once=opens)  # what was behind a door is gone afterwards
