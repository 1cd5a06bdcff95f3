"""The history encoder: features of s_t, the previous action and the previous reward, through a recurrent layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, create_mlp
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_ben.history.cells import CELLS, Hidden, linear_scan
from sb3_ben.history.samples import NO_ACTION, Observed, map_observations

__all__ = ["HistoryInput", "HistoryQNetwork", "Pass", "RandomEncoder"]

REWARD_CLIP = 10.0  # standard deviations


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

    def history_input(self, observed: Observed) -> th.Tensor:
        """What a recurrent layer eats at each step.

        :param observed: histories, with standardised rewards; of the beliefs, anything after the first ``belief_dim`` is ignored
        """
        actions = observed.previous_actions
        flat = map_observations(lambda part: part.flatten(0, 1), observed.observations)
        features = self.extract_features(flat, self.features_extractor).unflatten(0, actions.shape)
        if self.belief_dim:
            assert observed.beliefs is not None, "a network with a belief needs its features"
            features = th.cat((features, observed.beliefs[..., : self.belief_dim]), dim=-1)
        if not self.has_memory:
            return features
        one_hot = (actions[..., None] == self.indices).to(features.dtype)  # and nothing for -1
        rewards = observed.previous_rewards.clamp(-REWARD_CLIP, REWARD_CLIP) * (actions >= 0)
        return th.cat((features, one_hot, rewards[..., None]), dim=-1)


class Pass(NamedTuple):
    """What a network makes of T steps of B histories.

    :param latent: encodings ``(T, B, latent_dim)``
    :param q_values: standardised action values ``(T, B, n_actions)``
    :param hidden: the memory after the last step
    """

    latent: th.Tensor
    q_values: th.Tensor
    hidden: Hidden


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
        cell_class, self.rnn_kwargs = CELLS[rnn_type], rnn_kwargs or {}
        has_memory = cell_class.has_memory
        super().__init__(
            observation_space, action_space, features_extractor, features_dim, normalize_images, has_memory, belief_dim
        )
        self.net_arch, self.activation_fn = net_arch, activation_fn
        self.rnn_type, self.rnn_hidden_size, self.n_rnn_layers = rnn_type, rnn_hidden_size, n_rnn_layers
        self.input_net = nn.Sequential(*create_mlp(self.n_inputs, -1, net_arch, activation_fn))
        size = net_arch[-1] if net_arch else self.n_inputs
        self.cell = cell_class(size, rnn_hidden_size, n_rnn_layers, **self.rnn_kwargs)
        self.latent_net = nn.Sequential(*create_mlp(self.cell.output_size, -1, net_arch, activation_fn))
        self.latent_dim = net_arch[-1] if net_arch else self.cell.output_size
        self.q_head = nn.Linear(self.latent_dim, self.n_actions)
        self.register_buffer("scale", th.ones(()))
        self.register_buffer("offset", th.zeros(()))

    def initial_hidden(self, batch_size: int) -> Hidden:
        """The memory of an episode that has just begun."""
        return self.cell.initial(batch_size, self.scale.device)

    def forward(self, observed: Observed, hidden: Hidden | None = None) -> Pass:
        """One recurrent pass over a batch of histories, with standardised rewards."""
        return self.evaluate(self.history_input(observed), hidden)

    def evaluate(self, inputs: th.Tensor, hidden: Hidden | None = None) -> Pass:
        """One recurrent pass over a batch of histories, from what :meth:`history_input` has made of them."""
        hidden = self.initial_hidden(inputs.shape[1]) if hidden is None else hidden
        outputs, hidden = self.cell.recur(self.input_net(inputs), hidden)
        latent = self.latent_net(outputs)
        return Pass(latent, self.scale * self.q_head(latent) + self.offset, hidden)

    def hidden_states(self, inputs: th.Tensor) -> Hidden:
        """The memory after each step of histories from their beginning, ``(layers, T, B, size)``.

        :param inputs: what :meth:`history_input` has made of the histories
        """
        return self.cell.states(self.input_net(inputs), self.initial_hidden(inputs.shape[1]))

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

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        """Greedy actions at the beginning of an episode."""
        obs = map_observations(lambda part: part[None], observation)
        n_envs = len(next(iter(observation.values())) if isinstance(observation, dict) else observation)
        nothing = th.zeros(1, n_envs, device=self.device)
        q_values = self(Observed(obs, nothing.long() + NO_ACTION, nothing)).q_values
        return q_values[0].argmax(dim=-1) + int(self.action_space.start)

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
