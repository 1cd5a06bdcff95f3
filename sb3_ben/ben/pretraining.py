"""Algorithm 2 of the paper: what a step of pre-training learns from, by what is known before the first action."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th

from sb3_ben.ben.objectives import add_noise, clamp_to_rewards, msbbe_semi
from sb3_ben.ben.policies import Encoding
from sb3_ben.priors.models import first_histories
from sb3_ben.priors.transitions import transition_histories, with_pasts

if TYPE_CHECKING:
    from sb3_ben.ben.ben import BEN

__all__ = ["pretraining_stages"]


def pretraining_stages(model: BEN) -> list[Callable[[], dict[str, float]]]:
    """What each step of Algorithm 2 consists of, given what is known."""
    known = model.known
    stages: list[Callable[[], dict[str, float]]] = []
    if known.simulations is None and model.bellman in ("flow", "model"):
        if model._last_obs is None and model.env is None:
            raise ValueError("Pre-training under a prior over phi needs first observations: give the model an environment")
        obs = model.env.reset() if model._last_obs is None else model._last_obs  # type: ignore[union-attr]
        stages.append(partial(_first_observations, model, obs))
    if known.transitions is not None:
        stages.append(partial(_transitions, model))
    if known.simulations is not None:
        stages.append(partial(_simulations, model))
    if not stages:
        raise ValueError("There is nothing to pre-train on: neither flows nor transitions, simulations or a model in the prior")
    return stages


def _first_observations(model: BEN, first: Any) -> dict[str, float]:
    """A step on the MSBBE of all actions in first observations, under the exact model or the prior over phi."""
    policy = model.policy
    if model.bellman == "model":
        assert policy.tracker is not None, "a model is a filter"
        histories = first_histories(first, policy.tracker, model.device)
        logs = {"msbbe_first": model._update(histories)["train/msbbe"]}
        model._follow_target()
        return logs
    obs, _ = policy.obs_to_tensor(first)
    starts = th.ones(model.n_envs, dtype=th.bool, device=model.device)
    encoding, _ = policy.step(obs, policy.initial_memory(model.n_envs), th.zeros(model.n_envs, device=model.device), starts)
    phi = policy.sample_prior(model.n_phi_samples)
    with th.no_grad():
        context = model._contexts_of_all_actions(encoding)
        mean = policy.aleatoric.mean(context.flatten(0, 1), phi).mean(dim=0)
    loss = msbbe_semi(encoding.q_values, mean.view_as(encoding.q_values))
    model._descend(loss)
    return {"msbbe_first": loss.item()}


def _transitions(model: BEN) -> dict[str, float]:
    """A step on the MSBBE of known transitions. Their b is no mystery: Q is pulled to it, and with flows, these learn its
    density under hypotheses from the prior, which stays what it is."""
    policy, known = model.policy, model.known
    assert known.transitions is not None
    has_past = policy.rnn_type != "none" and policy.tracker is None  # filters know only pasts that can be
    length = int(np.random.randint(1, model.sequence_length + 1)) if has_past else 1
    drawn = known.transitions(length * model.batch_size)
    histories = transition_histories(drawn, model.observation_space, policy.action_space, policy.tracker, model.device)
    if has_past and not histories.dones.all():
        histories = with_pasts(histories, length)
    policy.reward_units.update(histories.rewards)
    encoding, _ = model._encode(histories)
    # of actions that nothing is known of, the best seem ever better if nothing holds them
    b = clamp_to_rewards(model._bellman_samples(histories, encoding.q_values), histories.rewards, model.gamma)
    q = encoding.q_values[:-1].gather(-1, histories.actions[..., None])[..., 0]
    targets = policy.bellman_units.standardize(b)
    msbbe = msbbe_semi(q, targets, histories.mask)
    loss, logs = msbbe, {"msbbe_transitions": msbbe.item()}
    if model.bellman == "flow":
        phi = policy.sample_prior(model.n_phi_samples)
        context = policy.context(Encoding(*(part[:-1] for part in encoding)), histories.actions)
        blurred = add_noise(targets[-1], model.bellman_noise)
        log_prob, counts = policy.aleatoric.log_prob(blurred, context[-1], phi).mean(dim=0), histories.mask[-1]
        nll = -(log_prob * counts).sum() / counts.sum().clamp_min(1)
        loss, logs["nll_transitions"] = msbbe + nll, nll.item()
    model._descend(loss)
    policy.update_bellman_units(b, histories.mask)
    model._follow_target()
    return logs


def _simulations(model: BEN) -> dict[str, float]:
    """A step of Algorithm 1 on simulated histories."""
    is_new = model._simulated is None
    buffer = model.simulated
    if is_new and model.policy.reward_units.count == 0:
        model.policy.reward_units.update(th.as_tensor(buffer.rewards[: buffer.size()], device=model.device))
    logs = model._update(buffer.sample(model.batch_size, env=model._vec_normalize_env))
    model._follow_target()
    return {name.removeprefix("train/").replace("/", "_"): value for name, value in logs.items()}
