"""The networks of BEN: recurrent Q, aleatoric flow, epistemic flow, in the order in which data passes through them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import get_parameters_by_name, polyak_update
from torch import nn
from torch.distributions import Distribution

from sb3_ben.ben.memory import Encoding, Memory, Recalled, RememberingPolicy
from sb3_ben.common.checks import check, check_choice, check_count
from sb3_ben.flows.aleatoric import AleatoricFlow, ConditionalDensity
from sb3_ben.flows.epistemic import default_prior, make_epistemic_flow
from sb3_ben.flows.units import RunningStandardizer
from sb3_ben.history.cells import CELLS, Hidden
from sb3_ben.history.encoder import HistoryInput, HistoryQNetwork, RandomEncoder
from sb3_ben.history.samples import HistoryReplaySamples, Observed
from sb3_ben.priors import Belief, BellmanModel
from sb3_ben.priors.prior import check_phi_prior

__all__ = [
    "ALIASES",
    "BENPolicy",
    "CnnLstmPolicy",
    "CnnPolicy",
    "Encoding",
    "Memory",
    "MlpGruPolicy",
    "MlpLstmPolicy",
    "MlpPolicy",
    "MultiInputLstmPolicy",
    "MultiInputPolicy",
    "Recalled",
]


class BENPolicy(RememberingPolicy):
    """Recurrent Q-network with its target, aleatoric and epistemic flow, and the units that values and rewards are measured in.

    :param observation_space: observation space
    :param action_space: action space
    :param lr_schedule: learning rate schedule of the Q-network
    :param net_arch: sizes of the fully connected layers, before and again after the recurrent layer
    :param activation_fn: their activation
    :param rnn_type: ``"lstm"``, ``"gru"``, ``"linear"`` or ``"none"`` (history-free), see :mod:`~sb3_ben.history.cells`; by
        default that of the policy's name
    :param rnn_hidden_size: size of the recurrent layer
    :param n_rnn_layers: number of recurrent layers
    :param rnn_kwargs: further arguments of the recurrent layer, such as ``max_time`` of ``"linear"``: its memory fades
    :param averaging: actions of ``predict`` are those of averaged weights of the Q-network, in which the past keeps this weight
        at every gradient step (such as 0.998); 0 for the latest weights. For problems where actions differ little in value:
        errors that come and go in the course of learning change the latest greedy actions, and cancel in the average.
        ``bellman_distribution`` goes by averaged weights, too
    :param phi_dim: number of coordinates of phi, the hypotheses about the Bellman operator
    :param prior: prior over phi, ``N(0, 0.1 I)`` if not given
    :param prior_spread: prior standard deviation of the mean of b, in standard deviations of b
    :param belief: a filter whose features join the history; given by the ``prior`` of the algorithm
    :param bellman_model: an exact model to use in place of the flows; given by the ``prior`` of the algorithm
    :param features_extractor_class: features extractor to use; by default that of the policy's name
    :param features_extractor_kwargs: keyword arguments of the features extractor
    :param normalize_images: whether images are divided by 255
    :param optimizer_class: optimiser of both the Q-network and the flows
    :param optimizer_kwargs: its keyword arguments besides the learning rate
    """

    action_space: spaces.Discrete
    n_averaged: th.Tensor  # gradient steps that the averaged weights have followed
    optimizer: th.optim.Optimizer
    posterior_optimizer: th.optim.Optimizer
    default_rnn_type: ClassVar[str] = "lstm"
    default_features_extractor_class: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor
    aleatoric_class: ClassVar[type[ConditionalDensity]] = AleatoricFlow

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        net_arch: list[int] | None = None,
        activation_fn: type[nn.Module] = nn.ReLU,
        rnn_type: str | None = None,
        rnn_hidden_size: int = 64,
        n_rnn_layers: int = 1,
        rnn_kwargs: dict[str, Any] | None = None,
        averaging: float = 0.0,
        phi_dim: int = 64,
        prior: Distribution | None = None,
        prior_spread: float = 0.5,
        belief: Belief | None = None,
        bellman_model: BellmanModel | None = None,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
    ) -> None:
        rnn_type = rnn_type or self.default_rnn_type
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class or self.default_features_extractor_class,
            features_extractor_kwargs,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            normalize_images=normalize_images,
        )
        check_choice("rnn_type", rnn_type, CELLS)
        check(0 <= averaging < 1, f"`averaging` must be at least 0 and less than 1, got {averaging}")
        for name, size in {"rnn_hidden_size": rnn_hidden_size, "n_rnn_layers": n_rnn_layers, "phi_dim": phi_dim}.items():
            check_count(name, size)
        check(0 <= prior_spread < np.inf, f"`prior_spread` must not be negative, and finite, got {prior_spread}")
        refused = {"batch_first", "bidirectional", "proj_size"} & set(rnn_kwargs or {})
        check(not refused, f"`rnn_kwargs` must not change the shapes of the memory, got {', '.join(sorted(refused))}")
        if prior is not None:
            check_phi_prior(prior, phi_dim)
        self.net_arch = [64] if net_arch is None else net_arch
        self.activation_fn = activation_fn
        self.rnn_type, self.rnn_hidden_size, self.n_rnn_layers = rnn_type, rnn_hidden_size, n_rnn_layers
        self.rnn_kwargs, self.averaging = rnn_kwargs, averaging
        self.phi_dim, self.prior, self.prior_spread = phi_dim, prior, prior_spread
        self.belief, self.bellman_model = belief, bellman_model
        self.tracker = self.make_tracker(belief, bellman_model, action_space)
        self._build(lr_schedule)

    @classmethod
    def remembers(cls, rnn_type: str | None = None) -> bool:
        """Whether policies of this class have a memory, with a recurrent layer of this type in place of their own."""
        cell = CELLS.get(rnn_type or cls.default_rnn_type)
        return cell is not None and cell.has_memory

    @property
    def device(self) -> th.device:
        """As in SB3, without a search through all modules for a parameter: that takes time in every prediction."""
        return self.reward_units.mean.device

    def _build(self, lr_schedule: Schedule) -> None:
        self.bellman_units, self.reward_units = RunningStandardizer(), RunningStandardizer()
        self.q_net, self.q_net_target = self.make_q_net(), self.make_q_net()
        self.q_net_target.load_state_dict(self.q_net.state_dict())
        self.q_net_target.set_training_mode(False)
        self.q_net_average = copy.deepcopy(self.q_net_target).requires_grad_(False) if self.averaging else None
        self.register_buffer("n_averaged", th.zeros(()))
        self._learns_features = next(self.q_net.features_extractor.parameters(), None) is not None
        self.random_encoder = RandomEncoder(**self._net_args(), has_memory=self.q_net.has_memory)
        self.aleatoric = self.make_aleatoric_flow()
        self.aleatoric_average = copy.deepcopy(self.aleatoric).requires_grad_(False) if self.averaging else None
        self.epistemic = make_epistemic_flow(self.phi_dim, self.prior_distribution())
        self.optimizer = self.make_optimizer(self.q_net.parameters(), lr_schedule(1))
        flows = [*self.aleatoric.parameters(), *self.epistemic.parameters()]
        self.posterior_optimizer = self.make_optimizer(flows, lr_schedule(1))

    def make_optimizer(self, parameters: Iterable[th.Tensor], learning_rate: float) -> th.optim.Optimizer:
        # for small networks, a loop over parameters in Python takes longer than what it computes
        can_fuse = self.optimizer_class in (th.optim.Adam, th.optim.AdamW) and not self.optimizer_kwargs.get("foreach")
        kwargs = ({"fused": True} if can_fuse else {}) | self.optimizer_kwargs
        return self.optimizer_class(parameters, lr=learning_rate, **kwargs)  # type: ignore[call-arg]

    def _net_args(self) -> dict[str, Any]:
        """What all networks over histories need, with a features extractor of their own."""
        spaces_ = {"observation_space": self.observation_space, "action_space": self.action_space}
        belief_dim = 0 if self.belief is None else int(self.belief.size)
        others = {"normalize_images": self.normalize_images, "belief_dim": belief_dim}
        return self._update_features_extractor({**spaces_, **others})

    def make_q_net(self) -> HistoryQNetwork:
        names = ("net_arch", "activation_fn", "rnn_type", "rnn_hidden_size", "n_rnn_layers", "rnn_kwargs")
        net_args = self._net_args() | {name: getattr(self, name) for name in names}
        return HistoryQNetwork(**net_args).to(self.device)

    @property
    def acting_net(self) -> HistoryQNetwork:
        """The Q-network whose greedy actions are those of ``predict``."""
        return self.q_net if self.q_net_average is None else self.q_net_average

    @property
    def acting_flow(self) -> ConditionalDensity:
        """The aleatoric flow that belongs to the encodings of :attr:`acting_net`."""
        return self.aleatoric if self.aleatoric_average is None else self.aleatoric_average

    def average_weights(self) -> None:
        """Let the averaged Q-network and the flow on its encodings follow, after each gradient step."""
        if self.q_net_average is None or self.aleatoric_average is None:
            return
        share = max(1 - self.averaging, 1 / (1 + float(self.n_averaged) / 10))  # at first over a tenth of the steps so far
        polyak_update(self.q_net.parameters(), self.q_net_average.parameters(), share)
        polyak_update(self.aleatoric.parameters(), self.aleatoric_average.parameters(), share)
        # the statistics of batch normalisation layers are averages already
        latest, average = (get_parameters_by_name(net, ["running_"]) for net in (self.q_net, self.q_net_average))
        polyak_update(latest, average, 1.0)
        self.n_averaged.add_(1)

    def make_aleatoric_flow(self) -> ConditionalDensity:
        n_actions, latent_dim = self.q_net.n_actions, self.q_net.latent_dim
        return self.aleatoric_class(
            context_dim=latent_dim + n_actions + 1,
            feature_dim=self.random_encoder.size + n_actions,
            phi_dim=self.phi_dim,  # type: ignore[call-arg]  # of all densities given a hypothesis
            prior_spread=self.prior_spread,
        )

    def prior_distribution(self) -> Distribution:
        """The prior over phi."""
        return default_prior(self.phi_dim) if self.prior is None else self.prior

    def sample_prior(self, n: int) -> th.Tensor:
        """Hypotheses (n, d) drawn from the prior."""
        return self.prior_distribution().sample(th.Size((n,))).to(self.device)

    def context(self, encoding: Encoding, actions: th.Tensor, detach_q: bool = True) -> th.Tensor:
        """The context (h_t, a_t, q_t) of the aleatoric flow, followed by the fixed features of the history and the action.

        :param encoding: encoded histories
        :param actions: indices of actions, of the same leading shape
        :param detach_q: whether q_t is a mere input, so that the likelihood cannot move the values
        """
        one_hot = nn.functional.one_hot(actions, self.q_net.n_actions).to(encoding.latent.dtype)
        features = nn.functional.rms_norm(encoding.features, encoding.features.shape[-1:], eps=1e-6)
        q = encoding.q_values.gather(-1, actions[..., None])
        # actions would hardly count beside so many other features of the same size
        action_features = one_hot * (features.shape[-1] ** 0.5 / 2)
        return th.cat((encoding.latent, one_hot, q.detach() if detach_q else q, features, action_features), dim=-1)

    def contexts_of_all_actions(self, encoding: Encoding) -> th.Tensor:
        """Contexts ``(n, n_actions, ...)`` of every action after each of n histories."""
        n_envs, n_actions = encoding.q_values.shape
        actions = th.arange(n_actions, device=self.device).expand(n_envs, n_actions)
        return self.context(encoding.map(lambda part: part[:, None].expand(-1, n_actions, -1)), actions)

    def history_input(self, net: HistoryInput, observed: Observed) -> th.Tensor:
        """What the recurrent layer of a network eats, with the rewards in the units that networks know."""
        rewards = self.reward_units.standardize(observed.previous_rewards)
        return net.history_input(observed._replace(previous_rewards=rewards))

    def encode(self, observed: Observed, hidden: Hidden | None = None, net: HistoryQNetwork | None = None) -> Recalled:
        """One recurrent pass of the Q-network and one of the random encoder over a batch of histories.

        :param observed: histories, with rewards in the environment's units
        :param hidden: what was remembered before, of both networks
        :param net: the Q-network, by default the one that learns
        """
        net = net or self.q_net
        own, fixed = (None, None) if hidden is None else (hidden[:-1], hidden[-1:])
        inputs = self.history_input(net, observed)
        learned = net.evaluate(inputs, own)
        if self._learns_features:
            inputs = self.history_input(self.random_encoder, observed)
        features, fixed = self.random_encoder(inputs, fixed)
        return Recalled(Encoding(learned.latent, learned.q_values, features), (*learned.hidden, *fixed))

    def expected_rewards(self, histories: HistoryReplaySamples) -> th.Tensor:
        """What a filter of the user's expected of the actions, where it says so; the rewards that came, where not."""
        if self.tracker is None or not self.tracker.n_rewards or histories.beliefs is None:
            return histories.rewards
        return self.tracker.expected_rewards(histories.beliefs[:-1], histories.actions)

    @th.no_grad()
    def update_bellman_units(self, b: th.Tensor, mask: th.Tensor) -> None:
        """Let the units of b follow new samples, without any value changing for it.

        The first samples define the units: before them, values are numbers without a unit and are left as they are.
        """
        units = self.bellman_units
        is_first = units.count == 0
        old_mean, old_std = units.mean.clone(), units.std.clone()
        units.update(b, mask)
        if not is_first:
            for net in (self.q_net, self.q_net_target, *([] if self.q_net_average is None else [self.q_net_average])):
                net.change_units(old_std / units.std, (old_mean - units.mean) / units.std)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        names = (
            *("net_arch", "activation_fn", "rnn_type", "rnn_hidden_size", "n_rnn_layers", "rnn_kwargs", "averaging"),
            *("phi_dim", "prior", "prior_spread", "belief", "bellman_model"),
            *("features_extractor_class", "features_extractor_kwargs", "optimizer_class", "optimizer_kwargs"),
        )
        data = super()._get_constructor_parameters() | {name: getattr(self, name) for name in names}
        return data | {"lr_schedule": self._dummy_schedule}

    def set_training_mode(self, mode: bool) -> None:
        """The target network and the average always stay in evaluation mode."""
        for module in (self.q_net, self.aleatoric, self.epistemic):
            module.train(mode)
        self.training = mode


MlpLstmPolicy = BENPolicy


class MlpGruPolicy(BENPolicy):
    """The paper's recurrent cell."""

    default_rnn_type = "gru"


class MlpPolicy(BENPolicy):
    """History-free: the contextual agent of the paper's ablation, which sees the current state alone."""

    default_rnn_type = "none"


class CnnLstmPolicy(BENPolicy):
    """For images."""

    default_features_extractor_class = NatureCNN


class CnnPolicy(CnnLstmPolicy):
    """For images, history-free."""

    default_rnn_type = "none"


class MultiInputLstmPolicy(BENPolicy):
    """For dictionaries of observations."""

    default_features_extractor_class = CombinedExtractor


class MultiInputPolicy(MultiInputLstmPolicy):
    """For dictionaries of observations, history-free."""

    default_rnn_type = "none"


#: the names by which users choose a policy
ALIASES: dict[str, type[BasePolicy]] = {
    "MlpLstmPolicy": MlpLstmPolicy,
    "MlpGruPolicy": MlpGruPolicy,
    "MlpPolicy": MlpPolicy,
    "CnnLstmPolicy": CnnLstmPolicy,
    "MultiInputLstmPolicy": MultiInputLstmPolicy,
    "CnnPolicy": CnnPolicy,
    "MultiInputPolicy": MultiInputPolicy,
}
