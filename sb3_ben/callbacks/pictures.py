"""Pictures of what an agent believes in the course of an episode, whatever the environment.

Margins are fixed: matplotlib needs as long to find them as for all the rest of a picture.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from sb3_ben.callbacks.episode import Moment

__all__ = ["ValuePanel", "animation", "colour", "density_figure", "encode_gif", "key_moments", "spread_figure"]


def colour(action: int) -> str:
    """A colour for each action, the same in all pictures."""
    return f"C{action % 10}"


def key_moments(moments: Sequence[Moment]) -> list[int]:
    """The first, the middle and the last step of an episode."""
    return sorted({0, len(moments) // 2, len(moments) - 1})


def density_figure(moments: Sequence[Moment], names: Sequence[str]) -> Figure:
    """Predicted densities of b, a panel for each of the key moments."""
    chosen = key_moments(moments)
    figure = Figure(figsize=(4 * len(chosen), 3.4))
    figure.subplots_adjust(left=0.12 / len(chosen), right=0.99, bottom=0.15, top=0.9, wspace=0.08)
    for axes, step in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        _draw_densities(axes, moments[step], names)
        axes.set(title=f"step {step}: chooses {names[moments[step].action]}", xlabel="b", yticks=[])
    figure.axes[0].set_ylabel("predicted density")
    figure.axes[0].legend(fontsize=8)
    return figure


def _draw_densities(axes: Axes, moment: Moment, names: Sequence[str]) -> None:
    """Densities of all actions on one scale, with their means."""
    samples, means = moment.beliefs.samples, moment.beliefs.mean
    limits = np.quantile(samples, (0.01, 0.99))
    limits = limits + np.array([-1, 1]) * max(0.02 * np.ptp(limits), 1e-3)  # histograms need a range that is not empty
    for action, name in enumerate(names):
        style: dict[str, Any] = {"histtype": "stepfilled", "alpha": 0.45, "color": colour(action)}
        axes.hist(samples[action], bins=40, range=tuple(limits), density=True, label=name, **style)
        axes.axvline(means[action], color=colour(action), linewidth=1)


def spread_figure(moments: Sequence[Moment], names: Sequence[str]) -> Figure:
    """Both standard deviations of b over the episode."""
    figure = Figure(figsize=(9, 3.4))
    figure.subplots_adjust(left=0.08, right=0.99, bottom=0.15, top=0.9, wspace=0.25)
    parts = {"epistemic: what it does not know": "epistemic_std", "aleatoric: what is left to chance": "aleatoric_std"}
    for axes, (title, part) in zip(figure.subplots(1, 2), parts.items(), strict=True):
        for action, name in enumerate(names):
            axes.plot([getattr(moment.beliefs, part)[action] for moment in moments], color=colour(action), label=name)
        axes.set(title=title, xlabel="step of the episode", ylabel="standard deviation of b")
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=8)
    return figure


def animation(moments: Sequence[Moment], names: Sequence[str]) -> list[Image.Image]:
    """The environment with BEN's values beside it, a frame for each step that has a picture."""
    pictured = [(moment, moment.frame) for moment in moments if moment.frame is not None]
    panel = ValuePanel([moment for moment, _ in pictured], names, height=len(pictured[0][1]))
    return [_beside(frame, panel.draw(step, moment)) for step, (moment, frame) in enumerate(pictured)]


class ValuePanel:
    """BEN's values of the actions at a moment, with a thin line for chance and a thick one for what it does not know.

    What stays the same from frame to frame is drawn once, which is several times as fast as a new figure for each.

    :param moments: all that are to be drawn, which share one scale
    :param names: names of the actions
    :param height: in pixels
    """

    def __init__(self, moments: Sequence[Moment], names: Sequence[str], height: int) -> None:
        figure = Figure(figsize=(3.6, height / 100), dpi=100)
        figure.subplots_adjust(left=0.2, right=0.97, bottom=0.14, top=0.92)
        self.canvas, self.axes, self.names = FigureCanvasAgg(figure), figure.subplots(), names
        self.actions = np.arange(len(names))
        zeros = np.zeros(len(names))
        self.chance = self.axes.vlines(self.actions, zeros, zeros, "0.7", linewidth=1.5, label="aleatoric")
        self.doubt = self.axes.vlines(self.actions, zeros, zeros, "tab:purple", linewidth=5, label="epistemic")
        self.means = self.axes.scatter(self.actions, zeros, c=[colour(action) for action in range(len(names))], zorder=3)
        self.choice = self.axes.scatter(0, 0, s=160, facecolors="none", edgecolors="black", zorder=4)
        self.axes.set_xticks(self.actions, names, rotation=30, fontsize=8)
        self.axes.set(ylabel="b", xlim=(-0.5, len(names) - 0.5), ylim=_scale(moments))
        self.axes.legend(fontsize=8, loc="lower left")

    def draw(self, step: int, moment: Moment) -> np.ndarray:
        """The panel as pixels."""
        mean, action = moment.beliefs.mean, moment.action
        for lines, std in ((self.chance, moment.beliefs.aleatoric_std), (self.doubt, moment.beliefs.epistemic_std)):
            ends = np.stack((mean - std, mean + std), axis=1)
            lines.set_segments(list(np.stack(np.broadcast_arrays(self.actions[:, None], ends), axis=-1)))
        self.means.set_offsets(np.stack((self.actions, mean), axis=1))
        self.choice.set_offsets([[action, mean[action]]])
        self.axes.set_title(f"step {step}: {self.names[action]}")
        self.canvas.draw()
        return np.array(self.canvas.buffer_rgba())[..., :3]


def _scale(moments: Sequence[Moment]) -> tuple[float, float]:
    """The limits within which all values and what chance adds to them are seen."""
    low = min((moment.beliefs.mean - moment.beliefs.aleatoric_std).min() for moment in moments)
    high = max((moment.beliefs.mean + moment.beliefs.aleatoric_std).max() for moment in moments)
    margin = 0.05 * (high - low) + 1e-3
    return low - margin, high + margin


def _beside(left: np.ndarray, right: np.ndarray) -> Image.Image:
    picture = Image.new("RGB", (left.shape[1] + right.shape[1], max(len(left), len(right))), "white")
    picture.paste(Image.fromarray(left), (0, 0))
    picture.paste(Image.fromarray(right), (left.shape[1], 0))
    return picture


def encode_gif(frames: Sequence[Image.Image], milliseconds: int = 500) -> bytes:
    """The frames as an animation that repeats for ever."""
    frames = [frame.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    return buffer.getvalue()
