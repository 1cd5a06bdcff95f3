"""A recurrent policy as one plain function, for ONNX and TorchScript: observation and memory in, values and memory out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch as th
from gymnasium import spaces
from torch import nn

from sb3_ben.history.samples import Observed

if TYPE_CHECKING:
    from sb3_ben.ben.policies import BENPolicy

__all__ = ["GreedyStep", "export_onnx", "export_torchscript"]


class GreedyStep(nn.Module):
    """One step of a greedy agent.

    Inputs: ``observation (n, ...)``, ``previous_action (n,)`` (-1 at the start of an episode), ``previous_reward (n,)``, where
    the policy has a belief its features ``belief (n, size)`` (the filter cannot be exported), and the recurrent state: one
    tensor ``(layers, n, size)`` for a GRU, two for an LSTM, zeros at the start of an episode. Outputs: ``action (n,)``,
    ``values (n, n_actions)`` in the units of rewards, and the next recurrent state.

    :param policy: the policy to export
    """

    def __init__(self, policy: BENPolicy) -> None:
        super().__init__()
        if isinstance(policy.observation_space, spaces.Dict):
            raise ValueError("Policies with dictionary observations cannot be exported")
        if policy.action_space.start < 0:
            raise ValueError("Policies with negative actions cannot be exported: -1 stands for no previous action")
        self.q_net = copy.deepcopy(policy.acting_net).requires_grad_(False)
        self.reward_units, self.bellman_units = copy.deepcopy((policy.reward_units, policy.bellman_units))
        self.start = int(policy.action_space.start)

    def forward(
        self, observation: th.Tensor, previous_action: th.Tensor, previous_reward: th.Tensor, *state: th.Tensor
    ) -> tuple[th.Tensor, ...]:
        actions = th.where(previous_action < 0, previous_action, previous_action - self.start)
        rewards = self.reward_units.standardize(previous_reward)
        beliefs = None
        if self.q_net.belief_dim:
            beliefs, state = state[0][None], state[1:]
        _, q_values, hidden = self.q_net(Observed(observation[None], actions[None], rewards[None], beliefs), state)
        return (q_values[0].argmax(dim=-1) + self.start, self.bellman_units.unstandardize(q_values[0]), *hidden)


def _example(policy: BENPolicy, n_envs: int = 2) -> tuple[th.Tensor, ...]:
    """Inputs of a first step."""
    sample = th.as_tensor(policy.observation_space.sample())
    observation = sample.expand(n_envs, *sample.shape).clone()
    no_action = th.full((n_envs,), -1, dtype=th.long)
    belief = (th.zeros(n_envs, policy.q_net.belief_dim),) if policy.q_net.belief_dim else ()
    return observation, no_action, th.zeros(n_envs), *belief, *(part.clone() for part in policy.q_net.initial_hidden(n_envs))


def export_torchscript(policy: BENPolicy, path: str | Path) -> None:
    """Write a policy as TorchScript, for ``torch.jit.load`` without this package.

    :param policy: the policy to export, on the CPU
    :param path: where to
    """
    policy.set_training_mode(False)
    with th.no_grad():
        th.jit.save(th.jit.trace(GreedyStep(policy).eval(), _example(policy)), str(path))


def export_onnx(policy: BENPolicy, path: str | Path) -> None:
    """Write a policy as ONNX, with a batch of any size. Needs the package ``onnx``.

    :param policy: the policy to export, on the CPU
    :param path: where to
    """
    policy.set_training_mode(False)
    n_state = len(policy.q_net.initial_hidden(1))
    states = [f"state_{i}" for i in range(n_state)]
    belief = ["belief"] if policy.q_net.belief_dim else []
    inputs = ["observation", "previous_action", "previous_reward", *belief, *states]
    outputs = ["action", "values", *(f"next_{name}" for name in states)]
    axes = {name: {1 if "state" in name else 0: "n"} for name in inputs + outputs}
    th.onnx.export(
        GreedyStep(policy).eval(),
        _example(policy),
        str(path),
        input_names=inputs,
        output_names=outputs,
        dynamic_axes=axes,
        dynamo=False,
    )
