"""Callbacks that put agents side by side in TensorBoard, and pictures of what BEN believes.

All of them can be named under ``callback:`` in the hyperparameters of rl-zoo3. The first two serve any SB3 algorithm::

    callback:
      - sb3_ben.callbacks.EpisodeStatsCallback
      - sb3_ben.callbacks.OracleCallback
      - sb3_ben.callbacks.BeliefCallback:
          n_steps: 20000
"""

from sb3_ben.callbacks.beliefs import BeliefCallback
from sb3_ben.callbacks.oracle import OracleCallback, custom_scalars_layout, exact_return, make_oracle, oracle_statistics
from sb3_ben.callbacks.rng import untouched_rng
from sb3_ben.callbacks.statistics import EpisodeStatsCallback, episode_statistics
from sb3_ben.callbacks.worlds import exact_belief, make_like, world_of

__all__ = [
    "BeliefCallback",
    "EpisodeStatsCallback",
    "OracleCallback",
    "custom_scalars_layout",
    "episode_statistics",
    "exact_belief",
    "exact_return",
    "make_like",
    "make_oracle",
    "oracle_statistics",
    "untouched_rng",
    "world_of",
]
