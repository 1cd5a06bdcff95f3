"""Search spaces for ``-optimize``, in the way of ``rl_zoo3.hyperparams_opt``.

A sampler draws plain numbers and names, which Optuna stores; its converter turns what was stored into arguments of the algorithm,
for the running trial and for ``--trial-id`` alike. What belongs to the task (``sequence_length``, ``n_envs``) is not searched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna

__all__ = ["CONVERTERS", "SAMPLERS"]

Sampler = Callable[["optuna.Trial", int, int, dict[str, Any]], dict[str, Any]]
Converter = Callable[[dict[str, Any]], dict[str, Any]]

NET_ARCHS = {"tiny": [32], "small": [64], "medium": [128], "deep": [64, 64]}


def _sample_q_learning(trial: optuna.Trial) -> dict[str, Any]:
    """What all value-based algorithms share."""
    one_minus_gamma = trial.suggest_float("one_minus_gamma", 0.0001, 0.1, log=True)
    batch_size_pow = trial.suggest_int("batch_size_pow", 4, 8)
    # Display true values
    trial.set_user_attr("gamma", 1 - one_minus_gamma)
    trial.set_user_attr("batch_size", 2**batch_size_pow)
    return {
        "one_minus_gamma": one_minus_gamma,
        "batch_size_pow": batch_size_pow,
        "learning_rate": trial.suggest_float("learning_rate", 1e-4, 5e-3, log=True),
        "train_freq": trial.suggest_categorical("train_freq", [1, 2, 4, 8]),
        "gradient_steps": trial.suggest_categorical("gradient_steps", [1, 2, 4]),
        "target_update_interval": trial.suggest_int("target_update_interval", 32, 4096, log=True),
        "tau": trial.suggest_float("tau", 0.01, 1.0, log=True),
        "net_arch": trial.suggest_categorical("net_arch", list(NET_ARCHS)),
    }


def _convert_q_learning(sampled_params: dict[str, Any]) -> dict[str, Any]:
    hyperparams = sampled_params.copy()
    hyperparams["gamma"] = 1 - hyperparams.pop("one_minus_gamma")
    hyperparams["batch_size"] = 2 ** hyperparams.pop("batch_size_pow")
    hyperparams["policy_kwargs"] = {"net_arch": list(NET_ARCHS[hyperparams.pop("net_arch")])}
    return hyperparams


def sample_ben_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """Sampler for BEN hyperparams.

    :param trial: the trial to draw for
    :param n_actions: unused, as in the samplers of DQN
    :param n_envs: unused
    :param additional_args: unused
    """
    return convert_ben_params(
        {
            **_sample_q_learning(trial),
            "exploration_fraction": trial.suggest_float("exploration_fraction", 0.05, 0.8),
            "exploration_final_eps": trial.suggest_float("exploration_final_eps", 0.0, 0.1),
            "n_posterior_steps": trial.suggest_int("n_posterior_steps", 1, 3),
            "double_q": trial.suggest_categorical("double_q", [False, True]),
            "action_gap": trial.suggest_categorical("action_gap", [0.0, 0.5, 0.8]),
            "rnn_hidden_size": trial.suggest_categorical("rnn_hidden_size", [32, 64, 128]),
            "prior_spread": trial.suggest_float("prior_spread", 0.1, 2.0, log=True),
        }
    )


def convert_ben_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """What was sampled for BEN, as arguments of its constructor."""
    hyperparams = _convert_q_learning(sampled_params)
    for name in ("rnn_hidden_size", "prior_spread"):
        hyperparams["policy_kwargs"][name] = hyperparams.pop(name)
    return hyperparams


def sample_bootdqn_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """Sampler for BootDQN hyperparams.

    :param trial: the trial to draw for
    :param n_actions: unused, as in the samplers of DQN
    :param n_envs: unused
    :param additional_args: unused
    """
    return convert_bootdqn_params(
        {
            **_sample_q_learning(trial),
            "prior_scale": trial.suggest_float("prior_scale", 0.3, 30.0, log=True),
            "mask_probability": trial.suggest_categorical("mask_probability", [0.5, 0.75, 1.0]),
            "double_q": trial.suggest_categorical("double_q", [False, True]),
        }
    )


def convert_bootdqn_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """What was sampled for BootDQN, as arguments of its constructor."""
    return _convert_q_learning(sampled_params)


SAMPLERS: dict[str, Sampler] = {"ben": sample_ben_params, "bootdqn": sample_bootdqn_params}
CONVERTERS: dict[str, Converter] = {"ben": convert_ben_params, "bootdqn": convert_bootdqn_params}
