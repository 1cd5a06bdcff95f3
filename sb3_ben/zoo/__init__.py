"""BEN, its baselines, environments and hyperparameters in rl-zoo3, without a fork of it.

Installing the package is enough for ``python -m rl_zoo3.train --algo ben --env Tiger-v0``: a start-up hook calls :func:`extend`
when rl-zoo3 is imported. ``python -m sb3_ben.zoo train --algo ben --env Tiger-v0`` needs no hook, it calls :func:`register`.
"""

from sb3_ben.zoo.registration import config_file, extend, register

__all__ = ["config_file", "extend", "register"]
