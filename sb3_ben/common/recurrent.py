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

from sb3_ben.common.buffers import map_observations

__all__ = ["RNN_TYPES", "Hidden", "HistoryEncoder", "HistoryQNetwork", "RandomEncoder", "select_rows"]

#: hidden state of the recurrent layer, one entry for a GRU, two for an LSTM, none without memory; each ``(layers, batch, size)``
Hidden = tuple[th.Tensor, ...]

RNN_TYPES: dict[str, type[nn.LSTM] | type[nn.GRU] | None] = {"lstm": nn.LSTM, "gru": nn.GRU, "none": None}
REWARD_CLIP = 10.0  # standard deviations


def select_rows(mask: th.Tensor, fresh: Hidden, old: Hidden) -> Hidden:
    """Hidden states, taken from ``fresh`` for the environments in the mask and from ``old`` for the others."""
    return tuple(th.where(mask[None, :, None], new, kept) for new, kept in zip(fresh, old, strict=True))


class HistoryEncoder(BasePolicy):
    """Encodes histories: fully connected layers, a recurrent layer, fully connected layers.

    Without memory (``rnn_type="none"``) it sees s_t alone: the contextual agent of the paper's ablation.

    :param observation_space: observation space
    :param action_space: action space
    :param features_extractor: features extractor
    :param features_dim: number of its features
    :param net_arch: sizes of the fully connected layers, before and again after the recurrent layer
    :param activation_fn: their activation
    :param normalize_images: whether images are divided by 255
    :param rnn_type: ``"lstm"``, ``"gru"`` or ``"none"``
    :param rnn_hidden_size: size of the recurrent layer
    :param n_rnn_layers: number of recurrent layers
    """

    action_space: spaces.Discrete

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
    ) -> None:
        super().__init__(
            observation_space, action_space, features_extractor=features_extractor, normalize_images=normalize_images
        )
        self.features_dim, self.net_arch, self.activation_fn = features_dim, net_arch, activation_fn
        self.rnn_type, self.rnn_hidden_size, self.n_rnn_layers = rnn_type, rnn_hidden_size, n_rnn_layers
        self.n_actions = int(action_space.n)
        rnn_class = RNN_TYPES[rnn_type]
        n_inputs = features_dim if rnn_class is None else features_dim + self.n_actions + 1
        self.input_net = nn.Sequential(*create_mlp(n_inputs, -1, net_arch, activation_fn))
        size = net_arch[-1] if net_arch else n_inputs
        self.rnn = None if rnn_class is None else rnn_class(size, rnn_hidden_size, n_rnn_layers)
        size = size if rnn_class is None else rnn_hidden_size
        self.latent_net = nn.Sequential(*create_mlp(size, -1, net_arch, activation_fn))
        self.latent_dim = net_arch[-1] if net_arch else size

    def initial_hidden(self, batch_size: int) -> Hidden:
        """The memory of an episode that has just begun."""
        if self.rnn is None:
            return ()
        zeros = th.zeros(self.n_rnn_layers, batch_size, self.rnn_hidden_size, device=self.device)
        return (zeros, zeros) if self.rnn_type == "lstm" else (zeros,)

    def history_input(self, obs: PyTorchObs, previous_actions: th.Tensor, previous_rewards: th.Tensor) -> th.Tensor:
        """What the recurrent layer eats at each step, the one place where a history is turned into numbers.

        :param obs: observations ``(T, B, ...)``
        :param previous_actions: ``(T, B)``, -1 where there was none
        :param previous_rewards: standardised, ``(T, B)``
        """
        steps = previous_actions.shape
        features = self.extract_features(map_observations(lambda part: part.flatten(0, 1), obs), self.features_extractor)
        features = features.unflatten(0, steps)
        if self.rnn is None:
            return features
        actions = F.one_hot(previous_actions + 1, self.n_actions + 1)[..., 1:].to(features.dtype)
        rewards = previous_rewards.clamp(-REWARD_CLIP, REWARD_CLIP) * (previous_actions >= 0)
        return th.cat((features, actions, rewards[..., None]), dim=-1)

    def encode(
        self, obs: PyTorchObs, previous_actions: th.Tensor, previous_rewards: th.Tensor, hidden: Hidden | None = None
    ) -> tuple[th.Tensor, Hidden]:
        """One recurrent pass over a batch of histories.

        :return: latent encodings ``(T, B, latent_dim)`` and the memory after the last step
        """
        inputs = self.input_net(self.history_input(obs, previous_actions, previous_rewards))
        if self.rnn is None:
            return self.latent_net(inputs), ()
        hidden = self.initial_hidden(inputs.shape[1]) if hidden is None else hidden
        if self.rnn_type == "lstm":
            outputs, after = self.rnn(inputs, hidden)
            return self.latent_net(outputs), after
        outputs, last = self.rnn(inputs, hidden[0])
        return self.latent_net(outputs), (last,)

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        raise NotImplementedError("a history-dependent network has no action for an observation alone; use the policy's predict")

    def _get_constructor_parameters(self) -> dict[str, Any]:
        names = ("features_dim", "net_arch", "activation_fn", "features_extractor", "rnn_type", "rnn_hidden_size", "n_rnn_layers")
        return super()._get_constructor_parameters() | {name: getattr(self, name) for name in names}


class HistoryQNetwork(HistoryEncoder):
    """A history encoder (``latent``, the h_t of the paper) and one linear value per action, in standardised units of b.

    It takes the arguments of :class:`HistoryEncoder`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.q_head = nn.Linear(self.latent_dim, self.n_actions)

    def forward(
        self, obs: PyTorchObs, previous_actions: th.Tensor, previous_rewards: th.Tensor, hidden: Hidden | None = None
    ) -> tuple[th.Tensor, th.Tensor, Hidden]:
        """Latent encodings ``(T, B, latent_dim)``, standardised action values ``(T, B, n_actions)`` and the memory."""
        latent, hidden = self.encode(obs, previous_actions, previous_rewards, hidden)
        return latent, self.q_head(latent), hidden


class RandomEncoder(HistoryEncoder):
    """A history encoder that is never trained: what is known about a history is measured in features that learning cannot bend.

    It takes the arguments of :class:`HistoryEncoder`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.requires_grad_(False).parameters():
            if parameter.dim() > 1:  # large enough for the recurrent layer to remember
                nn.init.normal_(parameter, std=1.5 / parameter[0].numel() ** 0.5)

    def forward(
        self, obs: PyTorchObs, previous_actions: th.Tensor, previous_rewards: th.Tensor, hidden: Hidden | None = None
    ) -> tuple[th.Tensor, Hidden]:
        """Encodings of unit mean square ``(T, B, latent_dim)`` and the memory after the last step."""
        latent, hidden = self.encode(obs, previous_actions, previous_rewards, hidden)
        return F.rms_norm(latent, latent.shape[-1:], eps=1e-6), hidden
