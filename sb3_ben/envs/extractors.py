"""Features extractors for our environments, for BEN and for the algorithms it is compared with."""

from __future__ import annotations

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch.nn import functional as F

__all__ = ["RescueExtractor"]


class RescueExtractor(BaseFeaturesExtractor):
    r"""What search and rescue shows, in terms that networks take up more easily.

    The place of the agent as one of :math:`N^2`, and for each entity the reading itself, which resolves the far range, and the
    distance :math:`\sqrt{-N \log \text{reading}}` that it stands for, which resolves the near range. Whatever follows in the
    observation (the previous action and reward, where a wrapper has added them) is passed on.

    :param observation_space: observation space of search and rescue
    :param n_entities: number of victims and hazards; all that follows the place of the agent, if not given
    """

    MIN_READING = 1e-6

    def __init__(self, observation_space: spaces.Box, n_entities: int | None = None) -> None:
        n_inputs = observation_space.shape[0]
        self.n_entities = n_inputs - 2 if n_entities is None else n_entities
        if not 0 <= self.n_entities <= n_inputs - 2:
            raise ValueError(f"`n_entities` must lie between 0 and {n_inputs - 2} for these observations, got {n_entities}")
        self.edge = int(observation_space.high[0])
        self.grid_size = 2 * self.edge + 1
        super().__init__(observation_space, self.grid_size**2 + self.n_entities + n_inputs)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        cell = (observations[:, :2] + self.edge).round().long().clamp(0, self.grid_size - 1)
        place = F.one_hot(cell[:, 0] * self.grid_size + cell[:, 1], self.grid_size**2)
        readings = observations[:, 2 : 2 + self.n_entities]
        distances = (-self.grid_size * readings.clamp_min(self.MIN_READING).log()).clamp_min(0).sqrt()
        # no reading at all is not a far one
        distances = th.where(readings > 0, distances, 0.0)
        return th.cat((place.to(observations.dtype), distances / self.grid_size, observations), dim=-1)
