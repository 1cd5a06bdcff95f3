"""What is known before the first step: a prior over phi, and domain knowledge in four forms that can be combined.

- known transitions (:class:`KnownTransitions`): what some actions in some states lead to, whatever the MDP
- simulations (:class:`Simulations`): environments drawn from the prior, and an agent that knows how to behave in them
- an exact model (:class:`BellmanModel`): the posterior over a few MDPs and what each of them does, in place of both flows
- a belief (:class:`Belief`): a recursive filter whose output joins the learned encoding of the history
"""

from sb3_ben.priors.filters import Belief, BeliefState, RewardBelief
from sb3_ben.priors.models import BellmanModel, Outcomes
from sb3_ben.priors.prior import Prior, PriorFactory
from sb3_ben.priors.simulations import Simulations
from sb3_ben.priors.transitions import KnownTransitions, Transitions
from sb3_ben.priors.wrappers import BeliefObservation

__all__ = [
    "Belief",
    "BeliefObservation",
    "BeliefState",
    "BellmanModel",
    "KnownTransitions",
    "Outcomes",
    "Prior",
    "PriorFactory",
    "RewardBelief",
    "Simulations",
    "Transitions",
]
