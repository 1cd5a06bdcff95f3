"""The history encoder: features of s_t, the previous action and the previous reward, through a recurrent layer."""

from __future__ import annotations

from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, create_mlp
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn
from torch.nn import functional as F

from sb3_ben.common.checks import check
from sb3_ben.history.samples import map_observations

__all__ = ["RNN_TYPES", "Hidden", "HistoryInput", "HistoryQNetwork", "RandomEncoder", "select_rows"]

#: hidden state of the recurrent layer, one entry for a GRU, two for an LSTM, none without memory; each ``(layers, batch, size)``
Hidden = tuple[th.Tensor, ...]

REWARD_CLIP = 10.0  # standard deviations


def select_rows(mask: th.Tensor, fresh: Hidden, old: Hidden) -> Hidden:
    """Hidden states, taken from ``fresh`` for the environments in the mask and from ``old`` for the others."""
    return tuple(th.where(mask[None, :, None], new, kept) for new, kept in zip(fresh, old, strict=True))


def linear_scan(inputs: th.Tensor, decay: th.Tensor, before: th.Tensor | None = None) -> th.Tensor:
    r"""The linear recurrence :math:`z_t = \lambda \odot z_{t-1} + x_t` over all steps, in a logarithmic number of passes.

    :param inputs: x ``(T, B, size)``
    :param decay: lambda ``(size,)``
    :param before: z before the first step ``(B, size)``, nothing if not given
    """
    if before is not None and len(inputs) == 1:
        return inputs + decay * before
    z = inputs if before is None else th.cat((inputs[:1] + decay * before, inputs[1:]))
    stride = 1
    while stride < len(z):  # twice as far back in every pass
        z = th.cat((z[:stride], z[stride:] + decay * z[:-stride]))
        stride, decay = 2 * stride, decay.square()
    return z


class LinearRNN(nn.Module):
    r"""Recurrent layers that add up evidence: :math:`z_t = \lambda \odot z_{t-1} + W x_t`, and :math:`z_t + D x_t` as output.

    What the layers before it make of one step is weighed and summed, each sum with a learned time constant. That is what beliefs
    do (log-odds of independent observations add up), no gradient vanishes on the way, and a pass over T steps takes
    log2 T operations instead of T. Arguments and calls are those of ``torch.nn.GRU``.

    :param input_size: number of inputs
    :param hidden_size: number of sums
    :param num_layers: number of layers, with ReLU between them
    :param max_time: the longest of the initial time constants, in steps; the shortest is a thousandth of it
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, max_time: float = 300.0) -> None:
        super().__init__()
        check(0 < max_time < float("inf"), f"`max_time` must be positive and finite, got {max_time}")
        sizes = [input_size] + [hidden_size] * num_layers
        self.inputs = nn.ModuleList(nn.Linear(size, hidden_size) for size in sizes[:-1])
        self.skips = nn.ModuleList(nn.Linear(size, hidden_size, bias=False) for size in sizes[:-1])
        times = th.logspace(-3, 0, hidden_size) * max_time
        self.log_times = nn.Parameter(times.log().repeat(num_layers, 1))

    def forward(self, inputs: th.Tensor, hidden: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """Outputs ``(T, B, hidden_size)`` and the memory after the last step ``(num_layers, B, hidden_size)``."""
        outputs, sums = self.scan(inputs, hidden)
        return outputs, th.stack([z[-1] for z in sums])

    def scan(self, inputs: th.Tensor, hidden: th.Tensor) -> tuple[th.Tensor, list[th.Tensor]]:
        """Outputs ``(T, B, hidden_size)`` and the memory after every step, in each layer ``(T, B, hidden_size)``."""
        sums: list[th.Tensor] = []
        for weigh, skip, log_time, before in zip(self.inputs, self.skips, self.log_times, hidden, strict=True):
            inputs = F.relu(inputs) if sums else inputs
            decay = th.exp(-th.exp(-log_time))
            # the variance of a sum does not depend on its time constant
            sums.append(linear_scan(weigh(inputs) * (1 - decay.square()).sqrt(), decay, before))
            inputs = sums[-1] + skip(inputs)
        return inputs, sums


RNN_TYPES: dict[str, type[nn.LSTM] | type[nn.GRU] | type[LinearRNN] | None] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "linear": LinearRNN,
    "none": None,
}


class HistoryInput(BasePolicy):
    """Turns histories into numbers: features of s_t, a belief where the user gives one, and, with memory, one-hot a_{t-1} and
    standardised r_{t-1}.

    :param observation_space: observation space
    :param action_space: action space
    :param features_extractor: features extractor
    :param features_dim: number of its features
    :param normalize_images: whether images are divided by 255
    :param has_memory: whether the history before s_t is seen at all
    :param belief_dim: number of features of the user's belief
    """

    action_space: spaces.Discrete
    indices: th.Tensor  # of the actions

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Discrete,
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        normalize_images: bool = True,
        has_memory: bool = True,
        belief_dim: int = 0,
    ) -> None:
        super().__init__(
            observation_space, action_space, features_extractor=features_extractor, normalize_images=normalize_images
        )
        self.features_dim, self.has_memory, self.belief_dim = features_dim, has_memory, belief_dim
        self.n_actions = int(action_space.n)
        self.n_inputs = features_dim + belief_dim + (self.n_actions + 1) * has_memory
        self.register_buffer("indices", th.arange(self.n_actions), persistent=False)

    def history_input(
        self, obs: PyTorchObs, previous_actions: th.Tensor, previous_rewards: th.Tensor, beliefs: th.Tensor | None = None
    ) -> th.Tensor:
        """What a recurrent layer eats at each step.

        :param obs: observations ``(T, B, ...)``
        :param previous_actions: ``(T, B)``, -1 where there was none
        :param previous_rewards: standardised, ``(T, B)``
        :param beliefs: what the user's filter says, ``(T, B, belief_dim)``; anything after the first ``belief_dim`` is ignored
        """
        steps = previous_actions.shape
        features = self.extract_features(map_observations(lambda part: part.flatten(0, 1), obs), self.features_extractor)
        features = features.unflatten(0, steps)
        if self.belief_dim:
            assert beliefs is not None, "a network with a belief needs its features"
            features = th.cat((features, beliefs[..., : self.belief_dim]), dim=-1)
        if not self.has_memory:
            return features
        actions = (previous_actions[..., None] == self.indices).to(features.dtype)  # one-hot, and nothing for -1
        rewards = previous_rewards.clamp(-REWARD_CLIP, REWARD_CLIP) * (previous_actions >= 0)
        return th.cat((features, actions, rewards[..., None]), dim=-1)


class HistoryQNetwork(HistoryInput):
    """Encodes histories and values their actions, in standardised units of the Bellman samples.

    Fully connected layers, a recurrent layer, fully connected layers (``latent``, the h_t of the paper), one linear output per
    action. Without memory (``rnn_type="none"``) it sees s_t alone: the contextual agent of the paper's ablation.

    :param observation_space: observation space
    :param action_space: action space
    :param features_extractor: features extractor
    :param features_dim: number of its features
    :param net_arch: sizes of the fully connected layers, before and again after the recurrent layer
    :param activation_fn: their activation
    :param normalize_images: whether images are divided by 255
    :param rnn_type: ``"lstm"``, ``"gru"``, ``"linear"`` or ``"none"``
    :param rnn_hidden_size: size of the recurrent layer
    :param n_rnn_layers: number of recurrent layers
    :param belief_dim: number of features of the user's belief
    :param rnn_kwargs: further arguments of the recurrent layer
    """

    scale: th.Tensor
    offset: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Discrete,
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        net_arch: list[int],
        activation_fn: type[nn.Module] = nn.ReLU,
        normalize_images: bool = True,
        rnn_type: str = "lstm",
        rnn_hidden_size: int = 64,
        n_rnn_layers: int = 1,
        belief_dim: int = 0,
        rnn_kwargs: dict[str, Any] | None = None,
    ) -> None:
        has_memory = rnn_type != "none"
        super().__init__(
            observation_space, action_space, features_extractor, features_dim, normalize_images, has_memory, belief_dim
        )
        self.net_arch, self.activation_fn = net_arch, activation_fn
        self.rnn_type, self.rnn_hidden_size, self.n_rnn_layers = rnn_type, rnn_hidden_size, n_rnn_layers
        self.input_net = nn.Sequential(*create_mlp(self.n_inputs, -1, net_arch, activation_fn))
        size = net_arch[-1] if net_arch else self.n_inputs
        rnn_class, self.rnn_kwargs = RNN_TYPES[rnn_type], rnn_kwargs or {}
        self.rnn = None if rnn_class is None else rnn_class(size, rnn_hidden_size, n_rnn_layers, **self.rnn_kwargs)
        size = size if rnn_class is None else rnn_hidden_size
        self.latent_net = nn.Sequential(*create_mlp(size, -1, net_arch, activation_fn))
        self.latent_dim = net_arch[-1] if net_arch else size
        self.q_head = nn.Linear(self.latent_dim, self.n_actions)
        self.register_buffer("scale", th.ones(()))
        self.register_buffer("offset", th.zeros(()))

    def initial_hidden(self, batch_size: int) -> Hidden:
        """The memory of an episode that has just begun."""
        if self.rnn is None:
            return ()
        zeros = th.zeros(self.n_rnn_layers, batch_size, self.rnn_hidden_size, device=self.scale.device)
        return (zeros, zeros) if self.rnn_type == "lstm" else (zeros,)

    def forward(
        self,
        obs: PyTorchObs,
        previous_actions: th.Tensor,
        previous_rewards: th.Tensor,
        hidden: Hidden | None = None,
        beliefs: th.Tensor | None = None,
    ) -> tuple[th.Tensor, th.Tensor, Hidden]:
        """Latent encodings ``(T, B, latent_dim)``, standardised action values ``(T, B, n_actions)`` and the memory."""
        return self.evaluate(self.history_input(obs, previous_actions, previous_rewards, beliefs), hidden)

    def evaluate(self, inputs: th.Tensor, hidden: Hidden | None = None) -> tuple[th.Tensor, th.Tensor, Hidden]:
        """One recurrent pass over a batch of histories, from what :meth:`history_input` has made of them."""
        outputs, hidden = self._recur(self.input_net(inputs), hidden)
        latent = self.latent_net(outputs)
        return latent, self.scale * self.q_head(latent) + self.offset, hidden

    def hidden_states(self, inputs: th.Tensor) -> Hidden:
        """The memory after each step of histories from their beginning, ``(layers, T, B, size)``: one pass where the recurrent
        layer tells it, a loop over time where it does not (LSTM, several layers of GRU).

        :param inputs: what :meth:`history_input` has made of the histories
        """
        if self.rnn is None:
            return ()
        inputs, hidden = self.input_net(inputs), self.initial_hidden(inputs.shape[1])
        if isinstance(self.rnn, LinearRNN):
            return (th.stack(self.rnn.scan(inputs, hidden[0])[1]),)
        if self.rnn_type == "gru" and self.n_rnn_layers == 1:
            return (self.rnn(inputs, hidden[0])[0][None],)
        return self._hidden_states_by_loop(inputs, hidden)

    def _hidden_states_by_loop(self, inputs: th.Tensor, hidden: Hidden) -> Hidden:
        steps = []
        for one in inputs:
            _, hidden = self._recur(one[None], hidden)
            steps.append(hidden)
        return tuple(th.stack(parts, dim=1) for parts in zip(*steps, strict=True))

    @th.no_grad()
    def change_units(self, factor: th.Tensor, shift: th.Tensor) -> None:
        """Express all values v in other units, as ``factor * v + shift``, without changing what they mean (PopArt).

        Small changes are remembered beside the last layer, and large ones put into its weights, for these to keep a size that
        suits their learning rate.
        """
        self.scale.mul_(factor)
        self.offset.mul_(factor).add_(shift)
        if not 0.5 < self.scale < 2:
            self.q_head.weight.mul_(self.scale)
            self.q_head.bias.mul_(self.scale).add_(self.offset)
            self.scale.fill_(1.0)
            self.offset.fill_(0.0)

    def _recur(self, inputs: th.Tensor, hidden: Hidden | None) -> tuple[th.Tensor, Hidden]:
        if self.rnn is None:
            return inputs, ()
        hidden = self.initial_hidden(inputs.shape[1]) if hidden is None else hidden
        if len(inputs) == 1 and self.n_rnn_layers == 1 and self.rnn_type != "linear":
            return self._single_step(inputs, hidden)
        outputs, after = self.rnn(inputs, hidden if self.rnn_type == "lstm" else hidden[0])
        return outputs, after if self.rnn_type == "lstm" else (after,)

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        """Greedy actions at the beginning of an episode."""
        obs = map_observations(lambda part: part[None], observation)
        n_envs = len(next(iter(observation.values())) if isinstance(observation, dict) else observation)
        nothing = th.zeros(1, n_envs, device=self.device)
        return self(obs, nothing.long() - 1, nothing)[1][0].argmax(dim=-1) + int(self.action_space.start)

    def _single_step(self, inputs: th.Tensor, hidden: Hidden) -> tuple[th.Tensor, Hidden]:
        """One step of the recurrent layer: as a cell, several times as fast as a sequence of length one."""
        weights: list[th.Tensor] = self.rnn._flat_weights  # type: ignore[union-attr, assignment]
        if self.rnn_type == "lstm":
            output, cell = th.lstm_cell(inputs[0], [part[0] for part in hidden], *weights)
            return output[None], (output[None], cell[None])
        output = th.gru_cell(inputs[0], hidden[0][0], *weights)
        return output[None], (output[None],)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        names = ["features_dim", "net_arch", "activation_fn", "features_extractor", "belief_dim"]
        names += ["rnn_type", "rnn_hidden_size", "n_rnn_layers", "rnn_kwargs"]
        return super()._get_constructor_parameters() | {name: getattr(self, name) for name in names}


class RandomEncoder(HistoryInput):
    r"""Features of a history that are never trained: what is known is measured in terms that learning cannot bend.

    A linear recurrence :math:`z_t = \lambda \odot z_{t-1} + W x_t` with random W and decays from 0 (the last step alone) to
    almost 1 (the whole history), far cheaper than a recurrent network.

    :param args: the arguments of :class:`HistoryInput`
    :param size: number of features
    """

    MAX_DECAY = 0.97
    weight: th.Tensor
    decay: th.Tensor

    def __init__(self, *args: Any, size: int = 64, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.size = size
        self.requires_grad_(False).set_training_mode(False)
        self.register_buffer("weight", th.randn(self.n_inputs, size) / self.n_inputs**0.5)
        self.register_buffer("decay", th.linspace(0, self.MAX_DECAY, size) * self.has_memory)

    def initial_hidden(self, batch_size: int) -> Hidden:
        """The memory of an episode that has just begun."""
        return (th.zeros(1, batch_size, self.size, device=self.weight.device),)

    @th.no_grad()
    def forward(self, inputs: th.Tensor, hidden: Hidden | None = None) -> tuple[th.Tensor, Hidden]:
        """Features ``(T, B, size)`` and the memory after the last step.

        :param inputs: what :meth:`history_input` has made of the histories
        :param hidden: the memory before the first step
        """
        z = linear_scan(inputs @ self.weight, self.decay, None if hidden is None else hidden[0][0])
        return z, (z[-1:],)

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        raise NotImplementedError("random features choose no actions")
