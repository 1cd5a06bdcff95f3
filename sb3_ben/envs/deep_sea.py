"""Deep sea (Osband et al., 2018), the problem in which undirected exploration needs exponentially many episodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_ben.envs.rendering import AGENT, BLUE, FLOOR, GOLD, WIDTH, _Canvas, _check_belief, _status, describe, draw
from sb3_ben.envs.views import WorldEnv, WorldVecEnv, WorldVectorEnv
from sb3_ben.envs.world import World, WorldConfig, require

__all__ = ["DeepSea", "DeepSeaConfig", "DeepSeaEnv", "DeepSeaVecEnv", "DeepSeaVectorEnv", "action_mapping"]


@lru_cache(maxsize=64)
def action_mapping(size: int, seed: int) -> np.ndarray:
    """The action that goes right in each cell, ``(size, size)`` of 0 and 1, by row and column; read-only."""
    mapping = np.random.default_rng(seed).integers(2, size=(size, size))
    mapping.flags.writeable = False
    return mapping


@dataclass(frozen=True)
class DeepSeaConfig(WorldConfig):
    """Arguments of ``DeepSea-v0``.

    :param size: N, number of rows, of columns and of steps in an episode
    :param mapping_seed: which of the two actions goes right is drawn for each cell with this seed, and stays the same in all
        episodes
    :param move_cost: what going right costs in all of an episode, ``move_cost / size`` each time
    :param treasure: reward for going right in the bottom right corner
    """

    size: int = 10
    mapping_seed: int = 0
    move_cost: float = 0.01
    treasure: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.size >= 1, "size", f"must be at least 1, got {self.size}")
        require(self.mapping_seed >= 0, "mapping_seed", f"must not be negative, got {self.mapping_seed}")
        require(self.move_cost >= 0, "move_cost", f"must not be negative, got {self.move_cost}")


class DeepSea(World[DeepSeaConfig]):
    """A diver starts in the top left corner of a square and sinks by one row with each step, to the left or to the right.

    Only who goes right ``size`` times in a row finds the treasure in the bottom right corner; each of these steps costs a little,
    going left is free, and random actions succeed once in ``2 ** size`` episodes. The observation is the cell, one-hot over
    ``size * size`` cells (all zeros at the bottom, when the episode has terminated). The context is the seed of the action
    mapping, ``mapping_seed`` unless ``reset`` is given another.
    """

    config_class = DeepSeaConfig
    terminates = True  # the bottom of the sea, not a time limit

    def __init__(self, n_envs: int, config: DeepSeaConfig) -> None:
        super().__init__(n_envs, config)
        self.horizon = config.size
        self.observation_space = spaces.Box(0.0, 1.0, (config.size**2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.column = np.zeros(n_envs, dtype=np.int64)
        self.mapping = np.zeros((n_envs, config.size, config.size), dtype=np.int64)
        self.stats = {name: np.zeros(n_envs, dtype=np.int64) for name in ("rights", "is_success")}

    def observe(self) -> np.ndarray:
        size = self.config.size
        cells = np.zeros((self.n_envs, size * size), dtype=np.float32)
        inside = np.flatnonzero(self.elapsed < size)
        cells[inside, self.elapsed[inside] * size + self.column[inside]] = 1
        return cells

    def _draw_context(self, rng: np.random.Generator) -> int:
        return self.config.mapping_seed

    def _check_context(self, context: Any) -> int:
        is_seed = isinstance(context, (int, np.integer)) and not isinstance(context, bool) and context >= 0
        require(bool(is_seed), "context", f"of deep sea is the seed of its action mapping, got {context!r}")
        return int(context)

    def _begin(self, indices: np.ndarray) -> None:
        self.column[indices] = 0
        for i in indices:
            self.mapping[i] = action_mapping(self.config.size, self.contexts[i])

    def _draw_noise(self, rng: np.random.Generator, n_steps: int) -> np.ndarray:
        return np.zeros(n_steps)  # nothing is left to chance

    def _advance(self, actions: np.ndarray, noise: np.ndarray) -> np.ndarray:
        config, corner = self.config, self.config.size - 1
        goes_right = actions == self.mapping[np.arange(self.n_envs), self.elapsed, self.column]
        finds = goes_right & (self.column == corner)  # in the last row: no other way leads to the last column and on
        self.column = np.clip(self.column + np.where(goes_right, 1, -1), 0, corner)
        self.stats["rights"] += goes_right
        self.stats["is_success"] += finds
        return config.treasure * finds - config.move_cost / config.size * goes_right


class DeepSeaEnv(WorldEnv):
    """``DeepSea-v0``; takes the arguments of :class:`DeepSeaConfig`."""

    world_class = DeepSea


class DeepSeaVecEnv(WorldVecEnv):
    """Many divers as one SB3 ``VecEnv``; takes the arguments of :class:`DeepSeaConfig`."""

    world_class = DeepSea


class DeepSeaVectorEnv(WorldVectorEnv):
    """Many divers as one gymnasium ``VectorEnv``; takes the arguments of :class:`DeepSeaConfig`."""

    world_class = DeepSea


def _check_cells(world: DeepSea, belief: Any) -> np.ndarray:
    return _check_belief(belief, (world.config.size,) * 2, "a number that is not negative for each cell, such as its uncertainty")


@draw.register
def _draw_deep_sea(world: DeepSea, i: int, belief: Any = None) -> np.ndarray:
    """The treasure, the diver (below the last row when the episode is over) and, shaded, the belief."""
    size, margin = world.config.size, 20
    canvas, unit = _Canvas(WIDTH + 60), (WIDTH - 2 * margin) / (size + 1)  # one more for the bottom
    left = (WIDTH - size * unit) / 2
    shades = np.zeros((size, size)) if belief is None else _check_cells(world, belief)
    shades = shades / max(shades.max(), 1e-12)
    for row, column in np.ndindex(size, size):
        x, y = left + column * unit, margin + row * unit
        colour = GOLD if row == column == size - 1 else _blend(FLOOR, AGENT, 0.7 * shades[row, column])
        canvas.box(x, y, x + 0.94 * unit, y + 0.94 * unit, colour)
        goes_right = world.mapping[i, row, column]
        canvas.disc(x + (0.78 if goes_right else 0.16) * unit, y + 0.47 * unit, 0.05 * unit, BLUE)  # which action goes right
    x, y = left + (world.column[i] + 0.47) * unit, margin + (world.elapsed[i] + 0.47) * unit
    canvas.disc(x, y, 0.3 * unit, AGENT)
    canvas.text(WIDTH / 2, WIDTH + 30, _status(world, i))
    return canvas.pixels()


def _blend(one: tuple[int, ...], other: tuple[int, ...], share: float) -> tuple[int, ...]:
    return tuple(round((1 - share) * a + share * b) for a, b in zip(one, other, strict=True))


@describe.register
def _describe_deep_sea(world: DeepSea, i: int, belief: Any = None) -> str:
    """The sea as text: ``O`` the diver, ``$`` the treasure; a belief is shown in tenths of its maximum."""
    size = world.config.size
    cells = np.full((size + 1, size), ".")
    cells[size] = " "
    if belief is not None:
        values = _check_cells(world, belief)
        cells[:size] = np.floor(9.99 * values / max(values.max(), 1e-12)).astype(int).astype(str)
    cells[size - 1, size - 1] = "$"
    cells[world.elapsed[i], world.column[i]] = "O"
    return "\n".join([*("".join(row) for row in cells), _status(world, i)])
