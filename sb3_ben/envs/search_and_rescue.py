"""The search and rescue gridworld of Fellows et al. (2024), appendix E.4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_ben.envs.views import WorldEnv, WorldVecEnv, WorldVectorEnv
from sb3_ben.envs.world import World, WorldConfig, require

__all__ = [
    "Rescue",
    "SearchAndRescue",
    "SearchAndRescueConfig",
    "SearchAndRescueEnv",
    "SearchAndRescueVecEnv",
    "SearchAndRescueVectorEnv",
    "door_cells",
    "door_centres",
]

UP, DOWN, LEFT, RIGHT, LISTEN = range(5)
DIRECTIONS = np.array([[0, 1], [0, -1], [-1, 0], [1, 0], [0, 0]])
NO_DOOR = -1
MAX_NOISE = 10.0  # standard deviations; no double-precision normal draw gets there, so the bound of the space costs nothing


@dataclass(frozen=True)
class SearchAndRescueConfig(WorldConfig):
    """Arguments of ``SearchAndRescue-v0``.

    :param grid_size: side N of the square grid, an odd number
    :param n_victims: number of victims
    :param n_hazards: number of hazards
    :param sigma_noise: standard deviation of the noise on the logarithm of a reading
    :param reward_victim: reward for opening the door of a victim, once per victim
    :param reward_hazard: reward for opening the door of a hazard, every time
    :param reward_listen: reward for listening
    :param horizon: number of steps before the time limit truncates the episode; 0 stands for ``5 * grid_size ** 2``
    """

    grid_size: int = 7
    n_victims: int = 4
    n_hazards: int = 8
    sigma_noise: float = 0.1
    reward_victim: float = 10.0
    reward_hazard: float = -100.0
    reward_listen: float = -1.0
    horizon: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        is_odd = self.grid_size >= 1 and self.grid_size % 2 == 1
        require(is_odd, "grid_size", f"must be an odd number of at least 1, got {self.grid_size}")
        require(self.n_victims >= 0, "n_victims", f"must not be negative, got {self.n_victims}")
        require(self.n_hazards >= 0, "n_hazards", f"must not be negative, got {self.n_hazards}")
        blamed = "n_victims" if self.n_victims > self.n_doors else "n_hazards"
        entities = f"n_victims + n_hazards = {self.n_entities}"
        require(self.n_entities <= self.n_doors, blamed, f"leaves {entities} for {self.n_doors} doors (4 * grid_size)")
        require(self.sigma_noise >= 0, "sigma_noise", f"must not be negative, got {self.sigma_noise}")
        require(self.horizon >= 0, "horizon", f"must not be negative, got {self.horizon}")

    @property
    def n_entities(self) -> int:
        return self.n_victims + self.n_hazards

    @property
    def n_doors(self) -> int:
        return 4 * self.grid_size

    @property
    def half(self) -> int:
        """The largest coordinate on the grid, whose centre is (0, 0)."""
        return (self.grid_size - 1) // 2

    @property
    def n_steps(self) -> int:
        return self.horizon or 5 * self.grid_size**2


@dataclass(frozen=True, eq=False)
class Rescue:
    """The context of an episode: where everybody is, victims first. The arrays are read-only.

    :param doors: door of each entity, in the numbering of :func:`door_cells`
    :param positions: place of each entity within the square behind its door, shape ``(n_entities, 2)``
    """

    doors: np.ndarray
    positions: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in (("doors", None), ("positions", float)):
            array = np.array(getattr(self, name), dtype=dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rescue):
            return NotImplemented
        return np.array_equal(self.doors, other.doors) and np.array_equal(self.positions, other.positions)

    def __hash__(self) -> int:
        return hash((self.doors.tobytes(), self.positions.tobytes()))


def door_cells(grid_size: int) -> tuple[np.ndarray, np.ndarray]:
    """From which cell, by which action, each of the ``4 * grid_size`` doors is opened: the doors of the upper edge from left to
    right, then the lower edge from left to right, the left edge from bottom to top and the right edge from bottom to top."""
    half = (grid_size - 1) // 2
    along = np.arange(-half, half + 1)
    edge = np.full(grid_size, half)
    cells = [np.stack(xy, axis=1) for xy in ((along, edge), (along, -edge), (-edge, along), (edge, along))]
    return np.concatenate(cells), np.repeat([UP, DOWN, LEFT, RIGHT], grid_size)


def door_centres(grid_size: int) -> np.ndarray:
    """Centres of the unit squares behind the doors, shape ``(n_doors, 2)``."""
    cells, actions = door_cells(grid_size)
    return cells + DIRECTIONS[actions]


class SearchAndRescue(World[SearchAndRescueConfig]):
    """An agent on a grid rescues victims and avoids hazards behind the doors around it, told apart by noisy hearing alone.

    Observation: position (x, y), then one reading ``exp(-distance^2 / N + noise)`` per entity, victims first; 0 before the first
    listen, refreshed by listening and kept in between. Actions: up, down, left, right, listen; moving off the grid opens the door
    in that direction instead. The context is a :class:`Rescue`.
    """

    config_class = SearchAndRescueConfig

    def __init__(self, n_envs: int, config: SearchAndRescueConfig) -> None:
        super().__init__(n_envs, config)
        self.horizon = config.n_steps
        half, n_entities = config.half, config.n_entities
        self.max_reading = np.exp(min(MAX_NOISE * config.sigma_noise, 80.0))  # e^80 still fits into a float32
        edge = max(half, 1)  # an empty range of positions, on a single square, is no proper space
        low = np.array([-edge, -edge] + [0] * n_entities, dtype=np.float32)
        high = np.array([edge, edge] + [self.max_reading] * n_entities, dtype=np.float32)
        self.observation_space = spaces.Box(low, high, dtype=np.float32)
        self.action_space = spaces.Discrete(5)
        self.far = 1000.0 * config.grid_size
        self.centres = door_centres(config.grid_size)
        self.door_at = np.full((config.grid_size, config.grid_size, 5), NO_DOOR)
        cells, openings = door_cells(config.grid_size)
        self.door_at[cells[:, 0] + half, cells[:, 1] + half, openings] = np.arange(config.n_doors)
        self.is_victim = np.arange(n_entities) < config.n_victims
        self.agent = np.zeros((n_envs, 2), dtype=np.int64)
        self.doors = np.full((n_envs, n_entities), NO_DOOR)
        self.positions = np.zeros((n_envs, n_entities, 2))
        self.readings = np.zeros((n_envs, n_entities))
        self.stats = {name: np.zeros(n_envs, dtype=np.int64) for name in ("victims", "hazards", "listens")}

    def observe(self) -> np.ndarray:
        return np.concatenate((self.agent, self.readings), axis=1, dtype=np.float32, casting="same_kind")

    def _draw_context(self, rng: np.random.Generator) -> Rescue:
        doors = rng.permutation(self.config.n_doors)[: self.config.n_entities]
        return Rescue(doors, self.centres[doors] + rng.uniform(-0.5, 0.5, (self.config.n_entities, 2)))

    def _check_context(self, context: Any) -> Rescue:
        require(isinstance(context, Rescue), "context", f"of search and rescue is a Rescue(doors, positions), got {context!r}")
        doors, positions = context.doors, context.positions
        n_entities, n_doors = self.config.n_entities, self.config.n_doors
        distinct = doors.shape == (n_entities,) and len(set(doors.tolist())) == n_entities
        valid = np.issubdtype(doors.dtype, np.integer) and bool(np.all((doors >= 0) & (doors < n_doors)))
        require(distinct and valid, "context", f"needs {n_entities} distinct doors in [0, {n_doors - 1}], got {doors}")
        inside = positions.shape == (n_entities, 2) and bool(np.all(abs(positions - self.centres[doors]) <= 0.5))
        require(inside, "context", "needs one position per entity, within the square behind its door")
        return context

    def _begin(self, indices: np.ndarray) -> None:
        for i in indices:
            self.doors[i], self.positions[i] = self.contexts[i].doors, self.contexts[i].positions
        self.agent[indices] = 0
        self.readings[indices] = 0

    def _draw_noise(self, rng: np.random.Generator, n_steps: int) -> np.ndarray:
        return rng.standard_normal((n_steps, self.config.n_entities))

    def _advance(self, actions: np.ndarray, noise: np.ndarray) -> np.ndarray:
        config = self.config
        half = config.half
        opened = self.door_at[self.agent[:, 0] + half, self.agent[:, 1] + half, actions]
        self.agent += DIRECTIONS[actions] * (opened == NO_DOOR)[:, None]
        behind = (self.doors == opened[:, None]) & (opened != NO_DOOR)[:, None]
        rescued = behind & self.is_victim
        self.doors[rescued] = NO_DOOR
        self.positions[rescued] = self.far
        listens = actions == LISTEN
        if listens.any():
            self._listen(listens, noise)
        victims = rescued.any(axis=1)
        hazards = (behind & ~self.is_victim).any(axis=1)
        for name, events in (("victims", victims), ("hazards", hazards), ("listens", listens)):
            self.stats[name] += events
        return np.select([listens, victims, hazards], [config.reward_listen, config.reward_victim, config.reward_hazard], 0.0)

    def _listen(self, listens: np.ndarray, noise: np.ndarray) -> None:
        """Refresh the readings of the slots that listen."""
        offsets = self.positions[listens] - self.agent[listens, None]
        log_readings = self.config.sigma_noise * noise[listens] - (offsets**2).sum(axis=-1) / self.config.grid_size
        self.readings[listens] = np.exp(np.minimum(log_readings, np.log(self.max_reading)))


class SearchAndRescueEnv(WorldEnv):
    """``SearchAndRescue-v0``; takes the arguments of :class:`SearchAndRescueConfig`."""

    world_class = SearchAndRescue


class SearchAndRescueVecEnv(WorldVecEnv):
    """Many search and rescue missions as one SB3 ``VecEnv``; takes the arguments of :class:`SearchAndRescueConfig`."""

    world_class = SearchAndRescue


class SearchAndRescueVectorEnv(WorldVectorEnv):
    """Many search and rescue missions as one gymnasium ``VectorEnv``; takes the arguments of :class:`SearchAndRescueConfig`."""

    world_class = SearchAndRescue
