"""Algorithm 2 of the paper: what a step of pre-training learns from, by what is known before the first action."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th

from sb3_ben.ben.learning import BELLMAN_NOISE, ModelOperator, bellman_samples
from sb3_ben.ben.objectives import add_noise, clamp_to_rewards, msbbe_semi
from sb3_ben.priors.models import first_histories
from sb3_ben.priors.transitions import Transitions, transition_histories, with_pasts

if TYPE_CHECKING:
    from sb3_ben.ben.ben import BEN
    from sb3_ben.ben.policies import Encoding
    from sb3_ben.history.samples import HistoryReplaySamples

__all__ = ["pretraining_stages"]


Stage = Callable[[], dict[str, float]]


def pretraining_stages(model: BEN, observations: Any) -> list[Stage]:
    """What each step of Algorithm 2 consists of, given what is known.

    :param model: the algorithm
    :param observations: the first observations of all environments, where these have been reset
    """
    known, operator = model.known, model.operator
    has_model = isinstance(operator, ModelOperator)
    stages: list[Stage] = []
    if known.simulations is None and (has_model or operator.has_flows):
        if observations is None and model.env is None:
            raise ValueError("Pre-training under a prior over phi needs first observations: give the model an environment")
        first = model.env.reset() if observations is None and model.env is not None else observations
        stages.append(partial(_first_model_step if has_model else _first_flow_step, model, first))
    if known.transitions is not None:
        stages.append(partial(_transitions, model))
    if known.simulations is not None:
        stages.append(partial(_simulations, model))
    if not stages:
        raise ValueError("There is nothing to pre-train on: neither flows nor transitions, simulations or a model in the prior")
    return stages


def _first_model_step(model: BEN, first: Any) -> dict[str, float]:
    """A step on the MSBBE of all actions in first observations, under the exact model."""
    assert model.policy.tracker is not None, "a model is a filter"
    logs = {"msbbe_first": model.update(first_histories(first, model.policy.tracker, model.device))["train/msbbe"]}
    model.follow_target()
    return logs


def _first_flow_step(model: BEN, first: Any) -> dict[str, float]:
    """A step on the MSBBE of all actions in first observations, under the prior over phi."""
    policy = model.policy
    obs, _ = policy.obs_to_tensor(first)
    starts = th.ones(model.n_envs, dtype=th.bool, device=model.device)
    nothing = th.zeros(model.n_envs, device=model.device)
    encoding = policy.step(obs, policy.initial_memory(model.n_envs), nothing, starts).encoding
    phi = policy.sample_prior(model.n_phi_samples)
    with th.no_grad():
        context = policy.contexts_of_all_actions(encoding)
        mean = policy.aleatoric.mean(context.flatten(0, 1), phi).mean(dim=0)
    loss = msbbe_semi(encoding.q_values, mean.view_as(encoding.q_values))
    model.descend(loss)
    return {"msbbe_first": loss.item()}


def _transitions(model: BEN) -> dict[str, float]:
    """A step on the MSBBE of known transitions. Their b is no mystery: Q is pulled to it, and with flows, these learn its
    density under hypotheses from the prior, which stays what it is."""
    policy, histories = model.policy, _known_histories(model)
    policy.reward_units.update(histories.rewards)
    encoding = policy.encode(histories.observed).encoding
    b, gaps = bellman_samples(policy, histories, encoding, model.rule)
    if policy.bellman_units.count == 0:
        policy.update_bellman_units(b, histories.mask)
    # of actions that nothing is known of, the best seem ever better if nothing holds them
    b = clamp_to_rewards(b, histories.rewards, model.gamma)
    q = encoding.q_values[:-1].gather(-1, histories.actions[..., None])[..., 0]
    targets = policy.bellman_units.standardize(b)
    msbbe = msbbe_semi(q, policy.bellman_units.standardize(b - gaps), histories.mask)
    loss, logs = msbbe, {"msbbe_transitions": msbbe.item()}
    if model.operator.has_flows:
        nll = _flow_loss(model, histories, encoding.map(lambda part: part[-2]), targets[-1])
        loss, logs["nll_transitions"] = msbbe + nll, nll.item()
    model.descend(loss)
    policy.update_bellman_units(b, histories.mask)
    model.follow_target()
    return logs


def _known_histories(model: BEN) -> HistoryReplaySamples:
    """A batch of known transitions, after pasts that could have been where there is a memory."""
    policy, known = model.policy, model.known
    assert known.transitions is not None
    has_past = policy.q_net.has_memory and policy.tracker is None  # filters know only pasts that can be
    length = int(np.random.randint(1, model.sequence_length + 1)) if has_past else 1
    drawn = Transitions(*known.transitions(length * model.batch_size))
    histories = transition_histories(drawn, model.observation_space, policy.action_space, policy.tracker, model.device)
    return with_pasts(histories, length, drawn.once) if has_past and not histories.dones.all() else histories


def _flow_loss(model: BEN, histories: HistoryReplaySamples, encoding: Encoding, targets: th.Tensor) -> th.Tensor:
    """The negative log-likelihood of the last transitions' b under hypotheses from the prior."""
    policy, counts = model.policy, histories.mask[-1]
    phi = policy.sample_prior(model.n_phi_samples)
    context = policy.context(encoding, histories.actions[-1])
    log_prob = policy.aleatoric.log_prob(add_noise(targets, BELLMAN_NOISE), context, phi).mean(dim=0)
    return -(log_prob * counts).sum() / counts.sum().clamp_min(1)


def _simulations(model: BEN) -> dict[str, float]:
    """A step of Algorithm 1 on simulated histories."""
    buffer = model.simulated
    if model.policy.reward_units.count == 0:
        model.policy.reward_units.update(th.as_tensor(buffer.rewards[: buffer.size()], device=model.device))
    logs = model.update(buffer.sample(model.batch_size, env=model.get_vec_normalize_env()))
    model.follow_target()
    return {name.removeprefix("train/").replace("/", "_"): value for name, value in logs.items()}
