"""The networks of BootDQN+prior: an ensemble of Q-networks, each with a fixed random prior, evaluated in one batched pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.dqn.policies import DQNPolicy
from torch import nn

__all__ = ["BootDQNPolicy", "CnnPolicy", "EnsembleQNetwork", "MlpPolicy", "MultiInputPolicy", "StackedLinear", "freeze"]

MemberState = tuple[np.ndarray, ...]


class StackedLinear(nn.Module):
    """``n_members`` linear layers side by side, each initialised like ``nn.Linear``.

    :param n_members: number of layers
    :param in_features: size of an input
    :param out_features: size of an output
    """

    def __init__(self, n_members: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = max(in_features, 1) ** -0.5
        self.weight = nn.Parameter(th.empty(n_members, in_features, out_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(th.empty(n_members, 1, out_features).uniform_(-bound, bound))

    def forward(self, inputs: th.Tensor) -> th.Tensor:
        """Map ``(B, in)``, the same for all members, or ``(n_members, B, in)`` to ``(n_members, B, out)``."""
        return th.baddbmm(self.bias, inputs.expand(len(self.weight), -1, -1), self.weight)


def stacked_mlp(
    n_members: int, input_dim: int, output_dim: int, net_arch: list[int], activation_fn: type[nn.Module]
) -> nn.Sequential:
    """``n_members`` multi-layer perceptrons side by side, SB3's ``create_mlp`` for an ensemble."""
    sizes = [input_dim, *net_arch]
    layers: list[nn.Module] = []
    for size, next_size in pairwise(sizes):
        layers += [StackedLinear(n_members, size, next_size), activation_fn()]
    return nn.Sequential(*layers, StackedLinear(n_members, sizes[-1], output_dim))


def freeze(module: nn.Module) -> nn.Module:
    """Turn the parameters of a module into buffers: they are saved and moved with it, but nothing can ever train them."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            delattr(part, name)
            part.register_buffer(name, None if parameter is None else parameter.detach().clone())
    return module.eval()


def scale_gradient(tensor: th.Tensor, factor: float) -> th.Tensor:
    """The tensor itself, with its gradient multiplied by ``factor``."""
    return factor * tensor + (1 - factor) * tensor.detach() if tensor.requires_grad else tensor


class EnsembleQNetwork(BasePolicy):
    """Q-values of all members: ``Q_k(s, a) = f_k(s, a) + prior_scale * p_k(s, a)``, with f_k trained and p_k random and fixed.

    The features extractor is shared by the members, and another one, random and fixed, by the priors: convolutions are most of
    the work on images, and extractors without parameters (``MlpPolicy``) leave nothing to share. Its gradient is the
    members' mean.

    :param observation_space: observation space
    :param action_space: action space
    :param features_extractor: trained features extractor
    :param prior_extractor: features extractor of the priors, which is frozen
    :param features_dim: number of features
    :param n_members: number of members
    :param prior_scale: by how much the priors are multiplied
    :param net_arch: sizes of each member's hidden layers
    :param activation_fn: their activation
    :param normalize_images: whether images are divided by 255
    """

    action_space: spaces.Discrete

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Discrete,
        features_extractor: BaseFeaturesExtractor,
        prior_extractor: BaseFeaturesExtractor,
        features_dim: int,
        n_members: int,
        prior_scale: float,
        net_arch: list[int],
        activation_fn: type[nn.Module] = nn.ReLU,
        normalize_images: bool = True,
    ) -> None:
        super().__init__(
            observation_space, action_space, features_extractor=features_extractor, normalize_images=normalize_images
        )
        self.net_arch, self.activation_fn, self.features_dim = net_arch, activation_fn, features_dim
        self.n_members, self.prior_scale = n_members, prior_scale
        self.n_actions = int(action_space.n)
        self.members = stacked_mlp(n_members, features_dim, self.n_actions, net_arch, activation_fn)
        self.prior_extractor = freeze(prior_extractor)
        self.prior = freeze(stacked_mlp(n_members, features_dim, self.n_actions, net_arch, activation_fn))

    def member_values(self, obs: PyTorchObs) -> th.Tensor:
        """Values ``(n_members, B, n_actions)`` of all actions after ``B`` observations."""
        features = self.extract_features(obs, self.features_extractor)
        values = self.members(scale_gradient(features, 1 / self.n_members))
        if self.prior_scale == 0:
            return values
        return values + self.prior_scale * self.prior_values(obs)

    @th.no_grad()
    def prior_values(self, obs: PyTorchObs) -> th.Tensor:
        """What the fixed networks say, before scaling, in the shape of :meth:`member_values`."""
        return self.prior(self.extract_features(obs, self.prior_extractor))  # type: ignore[arg-type]

    def forward(self, obs: PyTorchObs) -> th.Tensor:
        """The mean of the members, ``(B, n_actions)``: what DQN's network returns, for whoever reads values."""
        return self.member_values(obs).mean(dim=0)

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        return self(observation).argmax(dim=-1) + int(self.action_space.start)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        names = ("features_extractor", "prior_extractor", "features_dim", "n_members", "prior_scale", "net_arch", "activation_fn")
        return super()._get_constructor_parameters() | {name: getattr(self, name) for name in names}

    def train(self, mode: bool = True) -> EnsembleQNetwork:
        """The priors stay in evaluation mode: they are functions, not layers that gather statistics."""
        super().train(mode)
        self.prior_extractor.eval()
        self.prior.eval()
        return self


class BootDQNPolicy(DQNPolicy):
    """Ensemble of Q-networks with its target.

    :param observation_space: observation space
    :param action_space: action space
    :param lr_schedule: learning rate schedule
    :param net_arch: sizes of each member's hidden layers
    :param activation_fn: their activation
    :param features_extractor_class: features extractor to use, shared by the members
    :param features_extractor_kwargs: keyword arguments of the features extractor
    :param normalize_images: whether images are divided by 255
    :param optimizer_class: optimiser to use
    :param optimizer_kwargs: its keyword arguments besides the learning rate
    :param n_members: number of members
    :param prior_scale: by how much the fixed random priors are multiplied
    """

    action_space: spaces.Discrete
    q_net: EnsembleQNetwork  # type: ignore[assignment]
    q_net_target: EnsembleQNetwork  # type: ignore[assignment]

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        net_arch: list[int] | None = None,
        activation_fn: type[nn.Module] = nn.ReLU,
        features_extractor_class: type[BaseFeaturesExtractor] = FlattenExtractor,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        n_members: int = 20,
        prior_scale: float = 3.0,
    ) -> None:
        # before the base class, which builds the networks
        self.n_members, self.prior_scale = n_members, prior_scale
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch,
            activation_fn,
            features_extractor_class,
            features_extractor_kwargs,
            normalize_images,
            optimizer_class,
            optimizer_kwargs,
        )

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        if self.optimizer_class is th.optim.Adam and not self.optimizer_kwargs:
            # for small networks, a loop over parameters in Python takes longer than what it computes
            self.optimizer = th.optim.Adam(self.q_net.parameters(), lr=lr_schedule(1), fused=True)

    def make_q_net(self) -> EnsembleQNetwork:  # type: ignore[override]
        net_args = self._update_features_extractor(self.net_args)
        net_args["prior_extractor"] = self.make_features_extractor()
        return EnsembleQNetwork(**net_args, n_members=self.n_members, prior_scale=self.prior_scale).to(self.device)

    def _predict(self, obs: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        """Greedy actions: by the members' mean, or each row by a member drawn for it."""
        if deterministic:
            return self.q_net._predict(obs)
        values = self.q_net.member_values(obs)
        return self._greedy(values, np.random.randint(self.n_members, size=values.shape[1]))

    def _greedy(self, values: th.Tensor, members: np.ndarray) -> th.Tensor:
        """The actions that one member for each row holds best."""
        chosen = values[th.as_tensor(members, device=values.device), th.arange(len(members), device=values.device)]
        return chosen.argmax(dim=-1) + int(self.action_space.start)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: MemberState | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, MemberState | None]:
        """Actions, and the members to pass to the next call; see :meth:`sb3_ben.BootDQN.predict`."""
        if deterministic or isinstance(observation, tuple):  # SB3 explains to the caller why it wants no tuple
            return super().predict(observation, state, episode_start, deterministic)
        self.set_training_mode(False)
        values, vectorized = self.member_values(observation)
        members = self.members_of(state, episode_start, values.shape[1])
        actions = self._greedy(values, members).cpu().numpy()
        return (actions if vectorized else actions.squeeze(axis=0)), (members,)

    @th.no_grad()
    def member_values(self, observation: np.ndarray | dict[str, np.ndarray]) -> tuple[th.Tensor, bool]:
        """All members' values ``(n_members, n, n_actions)``, and whether the observation was a batch."""
        obs, vectorized = self.obs_to_tensor(observation)
        return self.q_net.member_values(obs), vectorized

    def members_of(self, state: MemberState | None, episode_start: np.ndarray | None, n_envs: int) -> np.ndarray:
        """The members that act: those of the state, but newly drawn ones where there is none or where an episode begins."""
        if state is None:
            return np.random.randint(self.n_members, size=n_envs)
        members = np.asarray(state[0])
        if members.shape != (n_envs,):
            raise ValueError(f"`state` holds members of shape {members.shape}, but {n_envs} observations were given")
        if episode_start is None or not np.any(episode_start):
            return members
        starts = np.asarray(episode_start, dtype=bool).reshape(n_envs)
        return np.where(starts, np.random.randint(self.n_members, size=n_envs), members)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return super()._get_constructor_parameters() | {"n_members": self.n_members, "prior_scale": self.prior_scale}


MlpPolicy = BootDQNPolicy


class CnnPolicy(BootDQNPolicy):
    """For images: the members share the convolutions and have one hidden layer of their own unless ``net_arch`` is given."""

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        net_arch: list[int] | None = None,
        *args: Any,
        features_extractor_class: type[BaseFeaturesExtractor] = NatureCNN,
        **kwargs: Any,
    ) -> None:
        # with linear heads on shared features, members would differ by little but their priors
        net_arch = [64] if net_arch is None else net_arch
        kwargs["features_extractor_class"] = features_extractor_class
        super().__init__(observation_space, action_space, lr_schedule, net_arch, *args, **kwargs)


class MultiInputPolicy(BootDQNPolicy):
    """For dictionaries of observations."""

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        *args: Any,
        features_extractor_class: type[BaseFeaturesExtractor] = CombinedExtractor,
        **kwargs: Any,
    ) -> None:
        kwargs["features_extractor_class"] = features_extractor_class
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)
