"""Pictures of the worlds, as text (``ansi``) and as pixels (``rgb_array``), with an optional belief laid over the truth.

What a belief is depends on the world:

* search and rescue: for every door P(nothing), P(victim) and P(hazard), shape ``(n_doors, 3)``,
* tiger: P(tiger behind door 1), a single number,
* Bernoulli bandit: the two parameters of the Beta posterior of every arm, shape ``(n_arms, 2)``.

A new world finds its room by registering with :func:`draw` and :func:`describe`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, singledispatch
from typing import Any

import gymnasium as gym
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sb3_ben.envs.bandit import BernoulliBandit
from sb3_ben.envs.search_and_rescue import DIRECTIONS, NO_DOOR, SearchAndRescue, door_cells
from sb3_ben.envs.tiger import Tiger
from sb3_ben.envs.world import World, require

__all__ = ["describe", "draw", "render"]

Colour = tuple[int, ...]

WIDTH = 480  # pixels; all sizes are even, as video codecs want them
SUPERSAMPLING = 3
ROUNDING = 1e-4  # by which a belief may miss being a probability
TILE, WALL = 0.94, 0.08  # size of the squares behind the doors and thickness of the walls, in cells

PAPER: Colour = (252, 252, 253)
INK: Colour = (52, 56, 70)
FAINT: Colour = (222, 225, 232)
FLOOR: Colour = (241, 243, 247)
WOOD: Colour = (166, 118, 76)
AGENT: Colour = (124, 58, 175)
GREEN: Colour = (34, 150, 72)
RED: Colour = (208, 44, 48)
PALE_GREEN: Colour = (168, 222, 178)
PALE_RED: Colour = (247, 180, 174)
ORANGE: Colour = (240, 145, 45)
GOLD: Colour = (247, 200, 64)
NIGHT: Colour = (62, 58, 76)
BLUE: Colour = (150, 184, 224)


def render(world: World, i: int, mode: str | None, belief: Any = None) -> str | np.ndarray | None:
    """Draw one episode of a world.

    :param world: the world
    :param i: which of its episodes
    :param mode: ``"ansi"`` for text, ``"rgb_array"`` for an image ``(height, width, 3)`` of bytes; with ``None`` there is nothing
        to draw, and a warning as in all of Gymnasium's environments
    :param belief: what somebody believes about the episode, in the form that the head of this module describes
    """
    if mode is None:
        gym.logger.warn(
            "You are calling render without a render mode. Specify it when you make the environment: render_mode='rgb_array'"
        )
        return None
    require(mode in ("ansi", "rgb_array"), "mode", f"must be None, 'ansi' or 'rgb_array', got {mode!r}")
    return describe(world, i, belief) if mode == "ansi" else draw(world, i, belief)


@singledispatch
def draw(world: World, i: int, belief: Any = None) -> np.ndarray:
    """An image of episode ``i``, shape ``(height, width, 3)``."""
    raise NotImplementedError(f"nobody has said how to draw a {type(world).__name__}")


@singledispatch
def describe(world: World, i: int, belief: Any = None) -> str:
    """A few lines of text about episode ``i``."""
    raise NotImplementedError(f"nobody has said how to describe a {type(world).__name__}")


def _check_belief(belief: Any, shape: tuple[int, ...], meaning: str) -> np.ndarray:
    array = np.asarray(belief, dtype=float)
    require(array.shape == shape, "belief", f"must be {meaning}, of shape {shape}; got shape {array.shape}")
    require(bool(np.all(np.isfinite(array) & (array >= -ROUNDING))), "belief", f"must be {meaning}; got {array}")
    return np.maximum(array, 0)


def _status(world: World, i: int) -> str:
    """How far the episode is and what has happened in it."""
    counts = [f"{name.replace('_', ' ')} {values[i]}" for name, values in world.stats.items()]
    return "   ".join([f"step {world.elapsed[i]}/{world.horizon}", *counts])


@lru_cache(maxsize=64)
def _font(size: int) -> Any:
    return ImageFont.load_default(size)


class _Canvas:
    """A sheet of paper with y pointing down, drawn larger than it is and reduced in the end, which smooths all edges."""

    def __init__(self, height: int) -> None:
        self._image = Image.new("RGB", (WIDTH * SUPERSAMPLING, height * SUPERSAMPLING), PAPER)
        self._pen = ImageDraw.Draw(self._image)

    def pixels(self) -> np.ndarray:
        return np.array(self._image.reduce(SUPERSAMPLING))

    def box(self, left: float, top: float, right: float, bottom: float, colour: Colour, radius: float = 0.0) -> None:
        x0, y0, x1, y1 = (round(SUPERSAMPLING * edge) for edge in (left, top, right, bottom))
        if x1 > x0 and y1 > y0:
            self._pen.rounded_rectangle((x0, y0, x1 - 1, y1 - 1), SUPERSAMPLING * radius, fill=colour)

    def ellipse(self, x: float, y: float, width: float, height: float, colour: Colour) -> None:
        corners = np.array([x - width, y - height, x + width, y + height]) * SUPERSAMPLING
        self._pen.ellipse(corners.tolist(), fill=colour)

    def disc(self, x: float, y: float, radius: float, colour: Colour) -> None:
        self.ellipse(x, y, radius, radius, colour)

    def polygon(self, points: Sequence[tuple[float, float]] | np.ndarray, colour: Colour) -> None:
        pen = ImageDraw.Draw(self._image, "RGBA") if len(colour) == 4 else self._pen  # four numbers: a translucent colour
        pen.polygon((np.asarray(points) * SUPERSAMPLING).ravel().tolist(), fill=colour)

    def line(self, start: tuple[float, float], end: tuple[float, float], width: float, colour: Colour) -> None:
        ends = (np.array([start, end]) * SUPERSAMPLING).ravel().tolist()
        self._pen.line(ends, fill=colour, width=max(1, round(SUPERSAMPLING * width)))

    def cross(self, x: float, y: float, size: float, width: float, colour: Colour) -> None:
        for side in (-size, size):
            self.line((x - size, y - side), (x + size, y + side), width, colour)

    def text(self, x: float, y: float, text: str, size: float = 15, anchor: str = "mm", colour: Colour = INK) -> None:
        font = _font(round(SUPERSAMPLING * size))
        self._pen.text((SUPERSAMPLING * x, SUPERSAMPLING * y), text, fill=colour, font=font, anchor=anchor)


# search and rescue


def _check_door_belief(world: SearchAndRescue, belief: Any) -> np.ndarray:
    shape = (world.config.n_doors, 3)
    array = _check_belief(belief, shape, "P(nothing), P(victim) and P(hazard) of every door")
    require(bool(np.allclose(array.sum(axis=1), 1, atol=ROUNDING)), "belief", "must sum to one at every door")
    return array


def _present(world: SearchAndRescue, i: int) -> np.ndarray:
    """Which entities wait behind a door: all but the rescued victims."""
    return np.flatnonzero(world.doors[i] != NO_DOOR)


class _Floor:
    """Where the coordinates of a grid lie on the canvas."""

    def __init__(self, canvas: _Canvas, half: int) -> None:
        self.canvas = canvas
        self.unit = WIDTH / (2 * half + 3.4)

    def place(self, x: float, y: float) -> tuple[float, float]:
        return WIDTH / 2 + self.unit * x, WIDTH / 2 - self.unit * y

    def square(self, centre: np.ndarray, size: float, colour: Colour) -> None:
        (x, y), reach = self.place(*centre), self.unit * size / 2
        self.canvas.box(x - reach, y - reach, x + reach, y + reach, colour)

    def line(self, start: Sequence[float] | np.ndarray, end: Sequence[float] | np.ndarray, width: float, colour: Colour) -> None:
        self.canvas.line(self.place(*start), self.place(*end), self.unit * width, colour)


@draw.register
def _draw_search_and_rescue(world: SearchAndRescue, i: int, belief: Any = None) -> np.ndarray:
    canvas = _Canvas(WIDTH + 92)
    floor = _Floor(canvas, world.config.half)
    for centre in world.centres:
        floor.square(centre, TILE, FLOOR)
    if belief is not None:
        _draw_door_belief(world, floor, _check_door_belief(world, belief))
    _draw_room(world, floor)
    for entity in _present(world, i):
        _draw_entity(floor, world.positions[i, entity], world.is_victim[entity])
    canvas.disc(*floor.place(*world.agent[i]), 0.31 * floor.unit, AGENT)
    _draw_readings(world, canvas, i)
    canvas.text(WIDTH / 2, WIDTH + 72, _status(world, i))
    return canvas.pixels()


def _draw_room(world: SearchAndRescue, floor: _Floor) -> None:
    """The cells of the grid, and the walls around them with their doors."""
    size, edge = world.config.grid_size, world.config.grid_size / 2
    floor.square(np.zeros(2), size, PAPER)
    for line in np.arange(1, size) - edge:
        floor.line((line, -edge), (line, edge), 0.03, FAINT)
        floor.line((-edge, line), (edge, line), 0.03, FAINT)
    for cell, action in zip(*door_cells(size), strict=True):
        outwards = DIRECTIONS[action]
        middle, along = cell + (0.5 - WALL / 2) * outwards, outwards[::-1]
        floor.line(middle - 0.5 * along, middle + 0.5 * along, WALL, INK)
        floor.line(middle - 0.3 * along, middle + 0.3 * along, WALL, WOOD)


def _draw_door_belief(world: SearchAndRescue, floor: _Floor, belief: np.ndarray) -> None:
    """Fill the square behind each door from below: green as far as a victim is expected, then red as far as a hazard is."""
    reach = floor.unit * TILE / 2
    for centre, (_, victim, hazard) in zip(world.centres, belief, strict=True):
        x, y = floor.place(*centre)
        bottom, middle, top = y + reach - 2 * reach * np.array([0, victim, min(victim + hazard, 1)])
        floor.canvas.box(x - reach, middle, x + reach, bottom, PALE_GREEN)
        floor.canvas.box(x - reach, top, x + reach, middle, PALE_RED)


def _draw_entity(floor: _Floor, position: np.ndarray, is_victim: bool) -> None:
    """A green circle for a victim, a red cross for a hazard, both with a white rim."""
    x, y = floor.place(*position)
    if is_victim:
        floor.canvas.disc(x, y, 0.19 * floor.unit, PAPER)
        floor.canvas.disc(x, y, 0.16 * floor.unit, GREEN)
    else:
        floor.canvas.cross(x, y, 0.16 * floor.unit, 0.15 * floor.unit, PAPER)
        floor.canvas.cross(x, y, 0.14 * floor.unit, 0.09 * floor.unit, RED)


def _draw_readings(world: SearchAndRescue, canvas: _Canvas, i: int) -> None:
    """A bar per entity for what was last heard of it."""
    top, height, margin = WIDTH + 4, 44, 66
    canvas.text(margin, top + height / 2, "heard", anchor="rm")
    pitch = (WIDTH - margin - 18) / max(world.config.n_entities, 1)
    width = min(0.7 * pitch, 28)
    for entity, reading in enumerate(world.readings[i]):
        left = margin + (entity + 0.5) * pitch - width / 2
        canvas.box(left, top, left + width, top + height, FLOOR)
        colour = GREEN if world.is_victim[entity] else RED
        canvas.box(left, top + height * (1 - min(reading, 1)), left + width, top + height, colour)


@describe.register
def _describe_search_and_rescue(world: SearchAndRescue, i: int, belief: Any = None) -> str:
    labels = np.full(world.config.n_doors, ".", dtype=object)
    for entity in _present(world, i):
        labels[world.doors[i, entity]] = "V" if world.is_victim[entity] else "H"
    picture = _text_grid(world, i, labels)
    if belief is not None:
        expected = [_text_belief(victim, hazard) for _, victim, hazard in _check_door_belief(world, belief)]
        picture = [left + "  |" + right for left, right in zip(picture, _text_grid(world, i, expected), strict=True)]
    heard = " ".join(f"{reading:.2f}" for reading in world.readings[i])
    return "\n".join([*picture, f"heard {heard}", _status(world, i)])


def _text_grid(world: SearchAndRescue, i: int, labels: Sequence[str] | np.ndarray) -> list[str]:
    """The grid with a label at every door, a line of text per row."""
    reach = world.config.half + 1
    rows = np.full((2 * reach + 1, 2 * reach + 1), "", dtype=object)
    rows[1:-1, 1:-1] = "_"
    for (x, y), label in zip([*world.centres, world.agent[i]], [*labels, "@"], strict=True):
        rows[reach - y, reach + x] = label
    return ["".join(f"{label:>5}" for label in row) for row in rows]


def _text_belief(victim: float, hazard: float) -> str:
    """The likelier of victim (v) and hazard (h) with its percentage."""
    percentage = round(100 * max(victim, hazard))
    return f"{'v' if victim >= hazard else 'h'}{percentage}" if percentage else "."


# tiger


def _check_tiger_belief(belief: Any) -> float:
    probability = _check_belief(belief, (), "P(tiger behind door 1)").item()
    require(probability <= 1 + ROUNDING, "belief", f"must be P(tiger behind door 1), got {probability}")
    return min(probability, 1.0)


@draw.register
def _draw_tiger_world(world: Tiger, i: int, belief: Any = None) -> np.ndarray:
    canvas = _Canvas(400)
    columns = np.array([WIDTH / 2, WIDTH / 2 - 110, WIDTH / 2 + 110])  # of the states s0, s1, s2
    for door, x in enumerate(columns[1:]):
        _draw_doorway(canvas, x, f"door {door + 1}")
        (_draw_tiger if world.tiger[i] == door else _draw_gold)(canvas, x, 150)
    if belief is not None:
        first = _check_tiger_belief(belief)
        for x, probability in zip(columns[1:], (first, 1 - first), strict=True):
            _draw_probability(canvas, x, 250, probability)
    for state, x in enumerate(columns):
        canvas.disc(x, 318, 26, FAINT)
        canvas.disc(x, 318, 24, AGENT if world.state[i] == state else PAPER)
        canvas.text(x, 318, f"s{state}", 17, colour=PAPER if world.state[i] == state else INK)
    canvas.text(WIDTH / 2, 374, _status(world, i))
    return canvas.pixels()


def _draw_doorway(canvas: _Canvas, x: float, name: str) -> None:
    canvas.text(x, 20, name, 17)
    canvas.box(x - 72, 38, x + 72, 228, WOOD, radius=10)
    canvas.box(x - 62, 48, x + 62, 228, NIGHT, radius=6)
    canvas.box(x - 80, 222, x + 80, 230, INK, radius=3)


def _draw_probability(canvas: _Canvas, x: float, y: float, probability: float) -> None:
    """A bar of the probability that the tiger is behind a door."""
    canvas.box(x - 72, y - 10, x + 72, y + 10, FAINT, radius=4)
    canvas.box(x - 72, y - 10, x - 72 + 144 * probability, y + 10, ORANGE, radius=4)
    canvas.text(x, y, f"P(tiger) {probability:.3f}", 13)


def _draw_tiger(canvas: _Canvas, x: float, y: float) -> None:
    """A face, of discs and triangles."""
    for side in (-1, 1):
        canvas.disc(x + side * 33, y - 34, 15, ORANGE)
        canvas.disc(x + side * 33, y - 34, 8, (250, 215, 180))
    canvas.ellipse(x, y, 50, 46, ORANGE)
    for side in (-1, 1):
        canvas.polygon([(x + side * 13, y - 40), (x + side * 22, y - 37), (x + side * 13, y - 23)], INK)
        for height in (-6, 10):
            canvas.polygon([(x + side * 46, y + height - 5), (x + side * 46, y + height + 5), (x + side * 30, y + height)], INK)
        canvas.ellipse(x + side * 17, y - 10, 8, 9, PAPER)
        canvas.disc(x + side * 16, y - 9, 5, INK)
        canvas.ellipse(x + side * 11, y + 22, 16, 13, PAPER)
    canvas.polygon([(x - 5, y - 42), (x + 5, y - 42), (x, y - 20)], INK)
    canvas.polygon([(x - 10, y + 8), (x + 10, y + 8), (x, y + 19)], INK)


def _draw_gold(canvas: _Canvas, x: float, y: float) -> None:
    """Three piles of coins."""
    for offset, n_coins in ((0, 7), (-28, 4), (28, 5)):
        for coin in range(n_coins):
            height = y + 58 - 10 * coin + (6 if offset else 0)
            canvas.ellipse(x + offset, height + 4, 25, 10, (176, 126, 24))
            canvas.ellipse(x + offset, height, 25, 10, GOLD)


@describe.register
def _describe_tiger(world: Tiger, i: int, belief: Any = None) -> str:
    doors = "   ".join(f"door {door + 1}: {'tiger' if world.tiger[i] == door else 'gold'}" for door in range(2))
    lines = [doors, f"state s{world.state[i]}", _status(world, i)]
    if belief is not None:
        lines.insert(1, f"P(tiger behind door 1) = {_check_tiger_belief(belief):.3f}")
    return "\n".join(lines)


# Bernoulli bandit


def _check_arm_belief(world: BernoulliBandit, belief: Any) -> np.ndarray:
    meaning = "the two positive parameters of each arm's Beta posterior"
    array = _check_belief(belief, (world.config.n_arms, 2), meaning)
    require(bool(np.all(array > 0)), "belief", f"must be {meaning}, got {array}")
    return array


@draw.register
def _draw_bandit(world: BernoulliBandit, i: int, belief: Any = None) -> np.ndarray:
    canvas = _Canvas(320)
    top, bottom, margin = 24, 244, 40
    posterior = None if belief is None else _check_arm_belief(world, belief)
    for level in (0, 0.5, 1):
        height = bottom - level * (bottom - top)
        canvas.line((margin - 8, height), (WIDTH - margin + 8, height), 1, FAINT)
        canvas.text(margin - 14, height, f"{level:g}", 12, anchor="rm")
    pitch = (WIDTH - 2 * margin) / world.config.n_arms
    for arm, probability in enumerate(world.probabilities[i]):
        x, reach = margin + (arm + 0.5) * pitch, min(0.36 * pitch, 40)
        canvas.box(x - reach, bottom - probability * (bottom - top), x + reach, bottom, BLUE)
        if posterior is not None:
            _draw_density(canvas, x, reach, top, bottom, posterior[arm])
        if pitch > 40:
            canvas.text(x, bottom + 14, f"arm {arm}", 13)
    canvas.text(WIDTH / 2, 292, _status(world, i))
    return canvas.pixels()


def _draw_density(canvas: _Canvas, x: float, reach: float, top: float, bottom: float, parameters: np.ndarray) -> None:
    """The density of a Beta distribution as a violin, as wide as ``2 * reach`` at its mode."""
    p = (np.arange(200) + 0.5) / 200
    log_density = (parameters[0] - 1) * np.log(p) + (parameters[1] - 1) * np.log1p(-p)
    half_width = reach * np.exp(log_density - log_density.max())
    seen = half_width > 0.01 * reach  # the tails would be drawn as a line
    half_width, heights = half_width[seen], (bottom - p * (bottom - top))[seen]
    right, left = np.stack((x + half_width, heights), axis=1), np.stack((x - half_width, heights), axis=1)
    canvas.polygon(np.concatenate((right, left[::-1])), (*AGENT, 120))


@describe.register
def _describe_bandit(world: BernoulliBandit, i: int, belief: Any = None) -> str:
    lines = [
        f"arm {arm}: {probability:.3f} {'#' * round(20 * probability):.<20}"
        for arm, probability in enumerate(world.probabilities[i])
    ]
    if belief is not None:
        posterior = _check_arm_belief(world, belief)
        lines = [f"{line} Beta({a:g}, {b:g})" for line, (a, b) in zip(lines, posterior, strict=True)]
    return "\n".join([*lines, _status(world, i)])
