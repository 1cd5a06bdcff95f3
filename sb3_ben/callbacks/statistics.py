"""What an environment counts in its episodes, for any algorithm."""

from __future__ import annotations

from collections import defaultdict, deque
from numbers import Real
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

__all__ = ["EpisodeStatsCallback", "episode_statistics"]

NOT_STATISTICS = ("context", "terminal_observation", "TimeLimit.truncated")  # numbers in `info` that count nothing


def episode_statistics(info: dict[str, Any]) -> dict[str, float]:
    """The numbers that an environment reports at the end of an episode."""
    is_number = {name: isinstance(value, (Real, np.bool_)) for name, value in info.items()}
    return {name: float(info[name]) for name in info if is_number[name] and name not in NOT_STATISTICS}


class EpisodeStatsCallback(BaseCallback):
    """Logs what the environment counts in ``info`` as ``episode/NAME``, averaged over the last episodes.

    In search and rescue these are ``episode/victims``, ``episode/hazards`` and ``episode/listens``: the same tags for every
    algorithm.

    :param window: number of episodes to average over
    :param verbose: verbosity level
    """

    def __init__(self, window: int = 100, verbose: int = 0) -> None:
        super().__init__(verbose)
        if window < 1:
            raise ValueError(f"`window` must be at least 1, got {window}")
        self._recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))
        self._means: dict[str, float] = {}

    def _on_step(self) -> bool:
        ended = [info for info, done in zip(self.locals["infos"], self.locals["dones"], strict=True) if done]
        for info in ended:
            for name, value in episode_statistics(info).items():
                self._recent[name].append(value)
        if ended:
            self._means = {name: float(np.mean(values)) for name, values in self._recent.items()}
        for name, mean in self._means.items():  # every time, since whoever writes the log forgets what was recorded
            self.logger.record(f"episode/{name}", mean)
        return True
