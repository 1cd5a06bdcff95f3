"""Replay buffers that remember which members of an ensemble may learn from which transition."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import PyTorchObs
from stable_baselines3.common.vec_env import VecNormalize

__all__ = ["BootstrapDictReplayBuffer", "BootstrapReplayBuffer", "BootstrapSamples"]


class BootstrapSamples(NamedTuple):
    """SB3's samples and their masks.

    :param observations: observations ``(B, ...)``
    :param actions: actions ``(B, 1)``
    :param next_observations: the observations that followed
    :param dones: 1 where the episode terminated (a time limit is no end), ``(B, 1)``
    :param rewards: rewards ``(B, 1)``
    :param masks: 1 where the transition belongs to a member's bootstrap sample, ``(B, n_members)``
    """

    observations: PyTorchObs
    actions: th.Tensor
    next_observations: PyTorchObs
    dones: th.Tensor
    rewards: th.Tensor
    masks: th.Tensor


class BootstrapReplayBuffer(ReplayBuffer):
    """SB3's replay buffer with a bootstrap mask for each transition and member, drawn when the transition is stored.

    :param args: as in SB3
    :param n_members: number of members
    :param mask_probability: probability with which a transition belongs to a member's bootstrap sample
    :param kwargs: as in SB3
    """

    masks: np.ndarray

    def __init__(self, *args: Any, n_members: int = 1, mask_probability: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.n_members = n_members
        self.mask_probability = mask_probability
        self.masks = np.zeros((self.buffer_size, self.n_envs, n_members), dtype=np.uint8)

    def add(self, *args: Any, **kwargs: Any) -> None:
        self.masks[self.pos] = np.random.random_sample(self.masks.shape[1:]) < self.mask_probability
        super().add(*args, **kwargs)

    def _get_samples(  # type: ignore[override]
        self, batch_inds: np.ndarray, env: VecNormalize | None = None
    ) -> BootstrapSamples:
        # SB3 draws the environments inside this method, so that a subclass cannot learn which ones: the masks need the same
        at = batch_inds, np.random.randint(0, self.n_envs, size=len(batch_inds))
        if self.optimize_memory_usage:
            next_obs = self._observations(self.observations, ((at[0] + 1) % self.buffer_size, at[1]), env)
        else:
            next_obs = self._observations(self.next_observations, at, env)
        return BootstrapSamples(
            self._observations(self.observations, at, env),
            self.to_torch(self.actions[at]),
            next_obs,
            self.to_torch((self.dones[at] * (1 - self.timeouts[at]))[:, None]),
            self.to_torch(self._normalize_reward(self.rewards[at][:, None], env)),
            self.to_torch(self.masks[at]).float(),
        )

    def _observations(self, stored: Any, at: tuple[np.ndarray, np.ndarray], env: VecNormalize | None) -> PyTorchObs:
        if isinstance(stored, dict):
            parts: Any = self._normalize_obs({key: part[at] for key, part in stored.items()}, env)
            return {key: self.to_torch(part) for key, part in parts.items()}
        array: Any = self._normalize_obs(stored[at], env)
        return self.to_torch(array)


class BootstrapDictReplayBuffer(BootstrapReplayBuffer, DictReplayBuffer):  # type: ignore[misc]
    """The same for dictionaries of observations."""
