"""What BEN believes of the Bellman operator, in the form that users see."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch as th

from sb3_ben.ben.learning import BELLMAN_NOISE
from sb3_ben.ben.objectives import total_variance
from sb3_ben.ben.policies import BENPolicy, Recalled

__all__ = ["BellmanDistribution", "distribution_of"]


class BellmanDistribution(NamedTuple):
    """What BEN believes of the Bellman operator b, for each environment and action.

    :param mean: predictive mean, ``(n_envs, n_actions)``
    :param epistemic_std: standard deviation between hypotheses: what more data would settle
    :param aleatoric_std: standard deviation within a hypothesis: what the world leaves to chance
    :param samples: draws from the predictive distribution of b with the noise of training, ``(n_envs, n_actions, n_samples)``
    """

    mean: np.ndarray
    epistemic_std: np.ndarray
    aleatoric_std: np.ndarray
    samples: np.ndarray


@th.no_grad()
def distribution_of(policy: BENPolicy, recalled: Recalled, n_samples: int) -> BellmanDistribution:
    """The law of b after histories, for every action.

    :param policy: policy with both flows
    :param recalled: encoded histories
    :param n_samples: number of draws, and of hypotheses that the moments are estimated with
    """
    context, units = policy.contexts_of_all_actions(recalled.encoding), policy.bellman_units
    phi, _ = policy.epistemic.rsample_and_log_prob(n_samples)
    mean, epistemic, chance = total_variance(*policy.acting_flow.moments(context.flatten(0, 1), phi), blur=BELLMAN_NOISE)
    samples = policy.acting_flow.sample(context.flatten(0, 1), phi, 1)[..., 0].T
    moments = [part.view(context.shape[:2]) for part in (units.unstandardize(mean), units.std * epistemic, units.std * chance)]
    parts = [*moments, units.unstandardize(samples).view(*context.shape[:2], n_samples)]
    return BellmanDistribution(*((part if recalled.is_batch else part[0]).cpu().numpy() for part in parts))
