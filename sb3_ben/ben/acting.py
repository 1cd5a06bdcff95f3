"""The ways to explore: what a step of training goes by, what is logged of it and what is saved, one class each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th

if TYPE_CHECKING:
    from sb3_ben.ben.policies import BENPolicy, Encoding

__all__ = ["EXPLORATIONS", "Epsilon", "Exploration", "Greedy", "PosteriorSampling", "Spread", "sometimes_random"]


class Exploration:
    """Greedy actions, and the interface of all ways to explore."""

    #: whether hypotheses are drawn from the flows
    needs_flows = False

    def values(self, policy: BENPolicy, encoding: Encoding, starts: np.ndarray) -> th.Tensor:
        """The values whose largest is acted on ``(n_envs, n_actions)``.

        :param policy: the policy that learns
        :param encoding: encoded histories of the training environments
        :param starts: which environments have begun a new episode
        """
        return encoding.q_values

    def random_share(self, n_envs: int, epsilon: float) -> np.ndarray | float:
        """The probability of a random action in training, by environment.

        :param n_envs: number of environments
        :param epsilon: what the schedule has come to
        """
        return 0.0

    def random_share_of_predict(self, epsilon: float) -> float:
        """The probability of a random action in ``predict(deterministic=False)``."""
        return 0.0

    def logs(self, epsilon: float) -> dict[str, float]:
        """What there is to log."""
        return {}

    def state(self) -> Any:
        """All that an exact resume needs."""
        return None

    def set_state(self, state: Any) -> None:
        """Go on from what :meth:`state` gave."""


Greedy = Exploration


class Epsilon(Exploration):
    """Random actions with a probability that falls in the course of training, tossed for each environment."""

    def random_share(self, n_envs: int, epsilon: float) -> np.ndarray | float:
        return epsilon

    def random_share_of_predict(self, epsilon: float) -> float:
        return epsilon

    def logs(self, epsilon: float) -> dict[str, float]:
        return {"rollout/exploration_rate": epsilon}


class Spread(Exploration):
    """A fixed range of epsilons over the environments, a quarter of which act at random."""

    LARGEST, SMALLEST = 0.5, 0.02

    def random_share(self, n_envs: int, epsilon: float) -> np.ndarray | float:
        n_random = n_envs // 4
        return np.concatenate((np.ones(n_random), np.geomspace(self.LARGEST, self.SMALLEST, n_envs - n_random)))


class PosteriorSampling(Exploration):
    """One hypothesis from the posterior for each episode, acted on as if it were true."""

    needs_flows = True

    def __init__(self) -> None:
        self._phi: np.ndarray | None = None

    @th.no_grad()
    def values(self, policy: BENPolicy, encoding: Encoding, starts: np.ndarray) -> th.Tensor:
        if self._phi is None or len(self._phi) != len(starts):
            self._phi = np.zeros((len(starts), policy.phi_dim), dtype=np.float32)
        if starts.any():
            self._phi[starts] = policy.epistemic.rsample_and_log_prob(int(starts.sum()))[0].cpu().numpy()
        phi = th.as_tensor(self._phi, device=encoding.latent.device)[:, None]
        return policy.aleatoric.mean(policy.contexts_of_all_actions(encoding), phi)[:, 0]

    def state(self) -> Any:
        return self._phi

    def set_state(self, state: Any) -> None:
        self._phi = state


#: the names by which users choose a way to explore
EXPLORATIONS: dict[str, type[Exploration]] = {
    "epsilon": Epsilon,
    "spread": Spread,
    "posterior": PosteriorSampling,
    "greedy": Greedy,
}


def sometimes_random(actions: np.ndarray, share: np.ndarray | float, n_actions: int) -> np.ndarray:
    """Actions (counted from 0), each replaced by a random one with a probability: one toss per environment, not one for all."""
    is_random = np.random.rand(*actions.shape) < share
    return np.where(is_random, np.random.randint(n_actions, size=actions.shape), actions)
