"""sb3_ben: the Bayesian Exploration Network as a Stable-Baselines3 plugin.

Importing the package registers its environments with Gymnasium and loads nothing heavy: the names below are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sb3_ben.envs import register_envs

if TYPE_CHECKING:
    from sb3_ben.ben import BEN
    from sb3_ben.bootdqn import BootDQN
    from sb3_ben.common.evaluation import evaluate_policy
    from sb3_ben.envs import make_vec
    from sb3_ben.history.previous_reward import VecPreviousReward
    from sb3_ben.history.replay import HistoryReplayBuffer

__version__ = "0.1.0"
__all__ = ["BEN", "BootDQN", "HistoryReplayBuffer", "VecPreviousReward", "__version__", "evaluate_policy", "make_vec"]

_MODULES = {
    "BEN": "sb3_ben.ben",
    "BootDQN": "sb3_ben.bootdqn",
    "HistoryReplayBuffer": "sb3_ben.history.replay",
    "VecPreviousReward": "sb3_ben.history.previous_reward",
    "evaluate_policy": "sb3_ben.common.evaluation",
    "make_vec": "sb3_ben.envs",
}

register_envs()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
