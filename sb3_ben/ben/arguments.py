"""Arguments of BEN that cannot be, alone or together: refused before anything is built, with what to do instead."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from gymnasium import spaces
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor

from sb3_ben.ben.acting import EXPLORATIONS
from sb3_ben.ben.learning import OPERATORS, ModelOperator, Operator
from sb3_ben.common.checks import check, check_choice, check_count, check_number
from sb3_ben.history.replay import HistoryReplayBuffer
from sb3_ben.priors import RewardBelief

if TYPE_CHECKING:
    from sb3_ben.ben.ben import BEN

__all__ = ["check_arguments", "check_prior", "operator_of"]

LARGE = sys.float_info.max  # for bounds that leave out infinity
#: the least that integers can be
COUNTS = {
    **dict.fromkeys(("buffer_size", "batch_size", "sequence_length", "n_posterior_steps", "n_phi_samples", "n_steps"), 1),
    "target_update_interval": 1,
    "gradient_steps": -1,
    "n_pretrain_steps": 0,
}
SHARES = ("tau", "gamma", "exploration_fraction", "exploration_initial_eps", "exploration_final_eps")


def operator_of(model: BEN) -> type[Operator]:
    """What Q is pulled to: an exact model of the prior's takes the place of the flows."""
    chosen = OPERATORS[model.bellman]
    return ModelOperator if chosen.has_flows and model.known.model is not None else chosen


def check_arguments(model: BEN) -> None:
    check_choice("bellman", model.bellman, OPERATORS)
    check_choice("exploration", model.exploration, EXPLORATIONS)
    check_observation_space(model)
    check_prior(model)
    operator = operator_of(model)
    if EXPLORATIONS[model.exploration].needs_flows and not operator.has_flows:
        raise ValueError(
            f"`exploration={model.exploration!r}` draws hypotheses from the flows, which this model goes without "
            f"(bellman={model.bellman!r}{'' if model.known.model is None else ', a model in the prior'})"
        )
    if model.n_steps != 1 and issubclass(operator, ModelOperator):
        raise ValueError("`n_steps` is for samples of what happened, and an exact model takes their place")
    check_numbers(model)
    if model.n_envs > model.target_update_interval:
        warnings.warn(
            f"The number of environments used is greater than the target network update interval ({model.n_envs} > "
            f"{model.target_update_interval}), therefore the target network is updated after each call to env.step(), "
            f"which corresponds to {model.n_envs} steps.",
            stacklevel=4,
        )


def check_numbers(model: BEN) -> None:
    """Look at each number alone."""
    frequency, *_ = model.train_freq if isinstance(model.train_freq, tuple) else (model.train_freq,)
    check_count("train_freq", frequency)
    for name, least in COUNTS.items():
        check_count(name, getattr(model, name), least)
    check_number("learning_starts", model.learning_starts, 0)
    for name in SHARES:
        check_number(name, getattr(model, name), 0, 1)
    if not callable(model.learning_rate):
        check_number("learning_rate", model.learning_rate, 0, LARGE)
    check(0 <= model.action_gap < 1, f"`action_gap` must be at least 0 and less than 1, got {model.action_gap}")
    for name in ("action_gap_limit", "max_grad_norm"):
        check(getattr(model, name) > 0, f"`{name}` must be positive, got {getattr(model, name)}")


def check_prior(model: BEN) -> None:
    """Say at once which parts of the prior do not go together with the rest."""
    known = model.known
    if known.phi is not None and model.policy_kwargs.get("prior") is not None:
        raise ValueError("There are two priors over phi, one in `prior` and one in `policy_kwargs`: give one of them")
    if (known.model is not None) != issubclass(operator_of(model), ModelOperator):
        which = "without" if known.model is None else "with"
        raise ValueError(f"`bellman={model.bellman!r}` does not go together with a prior {which} a model")
    filters = known.belief is not None or known.model is not None
    if filters and not issubclass(model.replay_buffer_class or HistoryReplayBuffer, HistoryReplayBuffer):
        raise ValueError("A prior with a belief or a model needs a HistoryReplayBuffer, which stores what filters say")
    normalize = None if model.env is None else model.get_vec_normalize_env()
    if filters and normalize is not None and normalize.norm_obs:
        raise ValueError("The filters of a prior read the environment's own observations: use VecNormalize(norm_obs=False)")
    if isinstance(known.belief, RewardBelief) and normalize is not None and normalize.norm_reward:
        raise ValueError("The rewards that a belief expects are the environment's own: use VecNormalize(norm_reward=False)")


def check_observation_space(model: BEN) -> None:
    """Say at once, and with a remedy, what the networks could only stumble over."""
    space = model.observation_space
    extractor = model.policy_kwargs.get("features_extractor_class") or model.policy_class.default_features_extractor_class
    if isinstance(space, spaces.Dict) and extractor is FlattenExtractor:
        raise ValueError("Observations are dictionaries: use MultiInputLstmPolicy, or a features extractor for them")
    if not isinstance(space, spaces.Dict) and extractor is CombinedExtractor:
        raise ValueError("Observations are no dictionaries: use MlpLstmPolicy, or CnnLstmPolicy for images")
