"""Arguments of BEN that cannot be, alone or together: refused before anything is built, with what to do instead."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from gymnasium import spaces
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor

from sb3_ben.common.checks import check, check_count, check_number
from sb3_ben.history.replay import HistoryReplayBuffer
from sb3_ben.priors import RewardBelief

if TYPE_CHECKING:
    from sb3_ben.ben.ben import BEN

__all__ = ["check_arguments", "check_prior"]

CHOICES = {
    "belief_scope": ("run", "episode"),
    "msbbe": ("semi", "double"),
    "elbo": ("exact", "paper"),
    "bellman": ("flow", "point", "model"),
    "exploration": ("epsilon", "spread", "posterior", "greedy"),
}
LARGE = sys.float_info.max  # for bounds that leave out infinity


def check_arguments(model: BEN) -> None:
    for name, choices in CHOICES.items():
        value = getattr(model, name)
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")
    check_observation_space(model)
    check_prior(model)  # which may change `bellman`
    if model.belief_scope == "episode" and not issubclass(model.replay_buffer_class or HistoryReplayBuffer, HistoryReplayBuffer):
        raise ValueError("`belief_scope='episode'` fits histories: it needs a HistoryReplayBuffer")
    if model.exploration == "posterior" and model.bellman != "flow":
        raise ValueError(
            f"`exploration='posterior'` draws hypotheses from the flows, which bellman={model.bellman!r} goes without"
        )
    if model.n_steps != 1 and model.bellman == "model":
        raise ValueError("`n_steps` is for samples of what happened, and an exact model takes their place")
    frequency, *_ = model.train_freq if isinstance(model.train_freq, tuple) else (model.train_freq,)
    check_count("train_freq", frequency)
    counts = (
        "buffer_size",
        "batch_size",
        "sequence_length",
        "n_posterior_steps",
        "n_phi_samples",
        "n_steps",
        "target_update_interval",
    )
    for name in counts:
        check_count(name, getattr(model, name))
    for name, least in (("gradient_steps", -1), ("n_pretrain_steps", 0), ("burn_in", 0)):
        check_count(name, getattr(model, name), least)
    check_number("learning_starts", model.learning_starts, 0)
    check_number("bellman_noise", model.bellman_noise, 0, LARGE)
    epsilons = ("exploration_fraction", "exploration_initial_eps", "exploration_final_eps")
    for name in ("tau", "gamma", "flow_weight", "encoder_weight", *epsilons):
        check_number(name, getattr(model, name), 0, 1)
    for name in ("learning_rate", "posterior_learning_rate"):
        if not callable(getattr(model, name)) and getattr(model, name) is not None:
            check_number(name, getattr(model, name), 0, LARGE)
    check(0 <= model.action_gap < 1, f"`action_gap` must be at least 0 and less than 1, got {model.action_gap}")
    for name in ("action_gap_limit", "max_grad_norm"):
        check(getattr(model, name) > 0, f"`{name}` must be positive, got {getattr(model, name)}")


def check_prior(model: BEN) -> None:
    """Say at once which parts of the prior do not go together with the rest."""
    known = model.known
    if known.phi is not None and model.policy_kwargs.get("prior") is not None:
        raise ValueError("There are two priors over phi, one in `prior` and one in `policy_kwargs`: give one of them")
    if known.model is not None and model.bellman == "flow":
        model.bellman = "model"
    if (known.model is not None) != (model.bellman == "model"):
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
    if known.simulations is not None and model.belief_scope == "episode":
        raise ValueError("`belief_scope='episode'` learns from the running episodes alone, and can use no simulations")


def check_observation_space(model: BEN) -> None:
    """Say at once, and with a remedy, what the networks could only stumble over."""
    space = model.observation_space
    extractor = model.policy_kwargs.get("features_extractor_class") or model.policy_class.default_features_extractor_class
    if isinstance(space, spaces.Dict) and extractor is FlattenExtractor:
        raise ValueError("Observations are dictionaries: use MultiInputLstmPolicy, or a features extractor for them")
    if not isinstance(space, spaces.Dict) and extractor is CombinedExtractor:
        raise ValueError("Observations are no dictionaries: use MlpLstmPolicy, or CnnLstmPolicy for images")
