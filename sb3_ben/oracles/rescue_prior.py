"""What is known about search and rescue before the first step, as parts of a :class:`~sb3_ben.common.priors.Prior`."""

from __future__ import annotations

import numpy as np

from sb3_ben.common.priors import BeliefState, Transitions
from sb3_ben.envs.search_and_rescue import DIRECTIONS, LISTEN, NO_DOOR, SearchAndRescueConfig, door_cells, door_centres
from sb3_ben.oracles.rescue_filter import FilterState, RescueFilter

__all__ = ["RescueBelief", "RescueTransitions"]

MAX_LISTENS = 4  # listens at one place that are told apart
VALUE, VICTIM, HAZARD = range(3)  # channels of the map


class RescueBelief:
    """The exact filter of search and rescue as a belief: a map of what is behind the doors, drawn around the agent.

    The map is a square with the agent in its middle, large enough for all doors wherever it stands, with three channels:
    expected reward of opening a door (in units of the reward for a victim, cut off at -1 and 1), probability of a victim and
    probability of a hazard. On the cells of the grid, which have no door, the first channel says how often the agent listened
    there (four times or more is 1): this is what makes the same probabilities worth another listen or not. What is left out is
    where exactly an entity is thought to be in the square behind its door, and the time: the end of an episode is a time limit.

    :param config: the arguments of the environment
    :param n_points: quadrature points per side of a square, as for :class:`~sb3_ben.oracles.rescue_filter.RescueFilter`
    """

    def __init__(self, config: SearchAndRescueConfig, n_points: int | None = None) -> None:
        self.config = config
        self.filter = RescueFilter(config, n_points)
        self.centres = door_centres(config.grid_size)
        along = np.arange(-config.half, config.half + 1)
        self.cells = np.stack(np.meshgrid(along, along, indexing="ij"), axis=-1).reshape(-1, 2)
        self.radius = 2 * config.half + 1
        self.width = 2 * self.radius + 1
        self.size = 3 * self.width**2
        self.unit = abs(config.reward_victim) or 1.0
        self._prior = self._probabilities(self.filter.initial(1))

    def initial(self, n_envs: int) -> BeliefState:
        """The filter's state, the probabilities of a victim and of a hazard at each door, and the listens at each cell."""
        listens = np.zeros((n_envs, len(self.cells)))
        return (*self.filter.initial(n_envs), self._prior.repeat(n_envs, axis=0), listens)

    def update(
        self, state: BeliefState, observations: np.ndarray, previous_actions: np.ndarray, previous_rewards: np.ndarray
    ) -> BeliefState:
        before, probabilities, listens = FilterState(*state[:4]), state[4], state[5]
        after = self.filter.update(before, observations, previous_actions, previous_rewards)
        listened = previous_actions == LISTEN
        opened = self.filter.opened_door(before.position, previous_actions) != NO_DOOR
        news = np.flatnonzero(listened | opened)  # moves tell nothing new, and the posterior is what costs time
        if news.size:
            probabilities = probabilities.copy()
            probabilities[news] = self._probabilities(FilterState(*(part[news] for part in after)))
        place = self._cell(after.position)[:, None] == np.arange(len(self.cells))
        return (*after, probabilities, listens + (place & listened[:, None]))

    def features(self, state: BeliefState) -> np.ndarray:
        position, probabilities, listens = state[0], state[4], state[5]
        n_envs = len(position)
        values = probabilities @ np.array([self.config.reward_victim, self.config.reward_hazard]) / self.unit
        canvas = np.zeros((n_envs, 3, self.width**2), dtype=np.float32)
        doors, cells = self._around(position, self.centres), self._around(position, self.cells)
        np.put_along_axis(canvas[:, VALUE], doors, np.clip(values, -1, 1), axis=1)
        np.put_along_axis(canvas[:, VALUE], cells, np.minimum(listens / MAX_LISTENS, 1), axis=1)
        np.put_along_axis(canvas[:, VICTIM], doors, probabilities[..., 0], axis=1)
        np.put_along_axis(canvas[:, HAZARD], doors, probabilities[..., 1], axis=1)
        return canvas.reshape(n_envs, -1)

    def door_probabilities(self, features: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Read the probabilities of a victim and of a hazard at each door off features, ``(n, n_doors, 2)``."""
        canvas = features.reshape(len(features), 3, -1)
        doors = self._around(position, self.centres)
        return np.stack([np.take_along_axis(canvas[:, channel], doors, axis=1) for channel in (VICTIM, HAZARD)], axis=-1)

    def _probabilities(self, state: FilterState) -> np.ndarray:
        return self.filter.posterior(state).doors[..., 1:]

    def _cell(self, position: np.ndarray) -> np.ndarray:
        x, y = position.astype(int).T + self.config.half
        return x * self.config.grid_size + y

    def _around(self, position: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Where places are on the map around each position, ``(n_envs, n_places)``."""
        offsets = (places - position[:, None]).astype(int) + self.radius
        return offsets[..., 0] * self.width + offsets[..., 1]


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
        return Transitions(observations, actions, np.where(opens, self.blind_reward, 0.0), after, np.zeros(n, dtype=bool))
