"""sb3_ben: the Bayesian Exploration Network as a Stable-Baselines3 plugin.

Importing the package registers its environments with Gymnasium and loads nothing heavy.
"""

from sb3_ben.envs import register_envs

__version__ = "0.1.0"
__all__ = ["__version__"]

register_envs()
