"""The networks of BEN: recurrent Q, aleatoric flow, epistemic flow, in the order in which data passes through them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.common.utils import get_parameters_by_name, polyak_update
from torch import nn
from torch.distributions import Distribution

from sb3_ben.common.checks import check, check_count
from sb3_ben.flows.aleatoric import AleatoricFlow, ConditionalDensity, SliceFlow
from sb3_ben.flows.epistemic import EpistemicFlow, default_prior
from sb3_ben.flows.units import RunningStandardizer
from sb3_ben.history.encoder import RNN_TYPES, Hidden, HistoryQNetwork, RandomEncoder, select_rows
from sb3_ben.history.previous_reward import previous_reward
from sb3_ben.history.samples import NO_ACTION, map_observations
from sb3_ben.priors import Belief, BellmanModel
from sb3_ben.priors.filters import BeliefTracker, Believed
from sb3_ben.priors.prior import check_phi_prior

__all__ = [
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
]

RecurrentState = tuple[np.ndarray, ...]


class Encoding(NamedTuple):
    """Encoded histories.

    :param latent: learned encoding h_t, ``(..., latent_dim)``
    :param q_values: standardised values of all actions, ``(..., n_actions)``
    :param features: fixed random features of the history, of any size, ``(..., size)``
    """

    latent: th.Tensor
    q_values: th.Tensor
    features: th.Tensor


class Memory(NamedTuple):
    """What the agent remembers between two steps of ``n`` episodes.

    :param hidden: state of the Q-network's recurrent layer, then that of the random encoder, then that of the user's filters
    :param actions: previous actions, -1 where an episode begins, ``(n,)``
    """

    hidden: Hidden
    actions: th.Tensor


class BENPolicy(BasePolicy):
    """Recurrent Q-network with its target, aleatoric and epistemic flow, and the units that values and rewards are measured in.

    :param observation_space: observation space
    :param action_space: action space
    :param lr_schedule: learning rate schedule of the Q-network
    :param net_arch: sizes of the fully connected layers, before and again after the recurrent layer
    :param activation_fn: their activation
    :param rnn_type: ``"lstm"``, ``"gru"``, ``"linear"`` or ``"none"`` (history-free); by default that of the policy's name
    :param rnn_hidden_size: size of the recurrent layer
    :param n_rnn_layers: number of recurrent layers
    :param rnn_kwargs: further arguments of the recurrent layer, such as ``max_time`` of ``"linear"``: its memory fades
    :param averaging: actions of ``predict`` are those of averaged weights of the Q-network, in which the past keeps this weight
        at every gradient step (such as 0.998); 0 for the latest weights. For problems where actions differ little in value:
        errors that come and go in the course of learning change the latest greedy actions, and cancel in the average.
        ``bellman_distribution`` goes by averaged weights, too
    :param phi_dim: number of coordinates of phi, the hypotheses about the Bellman operator
    :param prior: prior over phi, ``N(0, prior_variance)`` if not given
    :param prior_variance: variance of each coordinate under the default prior
    :param prior_spread: prior standard deviation of the mean of b, in standard deviations of b
    :param aleatoric_flow: ``"spline"``, or ``"slice"`` for the paper's two-dimensional flow with a slice, whose density is only a
        bound and whose mean takes samples (an ablation: slow)
    :param aleatoric_layers: number of affine-and-spline layers of the aleatoric flow, 1 to 4
    :param aleatoric_bins: bins of each spline
    :param aleatoric_hidden_size: width of the aleatoric flow's feature network
    :param epistemic_hidden_size: width of the epistemic flow's masked networks
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
        prior_variance: float = 0.1,
        prior_spread: float = 0.5,
        aleatoric_flow: str = "spline",
        aleatoric_layers: int = 1,
        aleatoric_bins: int = 16,
        aleatoric_hidden_size: int = 64,
        epistemic_hidden_size: int = 64,
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
        check(rnn_type in RNN_TYPES, f"`rnn_type` must be one of {list(RNN_TYPES)}, got {rnn_type!r}")
        check(1 <= aleatoric_layers <= 4, f"`aleatoric_layers` must lie between 1 and 4, got {aleatoric_layers}")
        check(aleatoric_flow in ("spline", "slice"), f"`aleatoric_flow` must be 'spline' or 'slice', got {aleatoric_flow!r}")
        check(0 <= averaging < 1, f"`averaging` must be at least 0 and less than 1, got {averaging}")
        sizes = {"rnn_hidden_size": rnn_hidden_size, "n_rnn_layers": n_rnn_layers, "phi_dim": phi_dim}
        sizes |= {"aleatoric_bins": aleatoric_bins, "aleatoric_hidden_size": aleatoric_hidden_size}
        for name, size in (sizes | {"epistemic_hidden_size": epistemic_hidden_size}).items():
            check_count(name, size)
        check(0 < prior_variance < np.inf, f"`prior_variance` must be positive and finite, got {prior_variance}")
        check(0 <= prior_spread < np.inf, f"`prior_spread` must not be negative, and finite, got {prior_spread}")
        refused = {"batch_first", "bidirectional", "proj_size"} & set(rnn_kwargs or {})
        check(not refused, f"`rnn_kwargs` must not change the shapes of the memory, got {', '.join(sorted(refused))}")
        self.net_arch = [64] if net_arch is None else net_arch
        self.activation_fn = activation_fn
        self.rnn_type, self.rnn_hidden_size, self.n_rnn_layers = rnn_type, rnn_hidden_size, n_rnn_layers
        self.rnn_kwargs, self.averaging = rnn_kwargs, averaging
        self.phi_dim, self.prior_variance, self.prior_spread = phi_dim, prior_variance, prior_spread
        self.aleatoric_flow, self.aleatoric_layers, self.aleatoric_bins = aleatoric_flow, aleatoric_layers, aleatoric_bins
        self.aleatoric_hidden_size, self.epistemic_hidden_size = aleatoric_hidden_size, epistemic_hidden_size
        self.prior = prior
        if prior is not None:
            check_phi_prior(prior, phi_dim)
        self.belief, self.bellman_model = belief, bellman_model
        self.tracker = self.make_tracker(belief, bellman_model, action_space)
        self._warned = False
        self._build(lr_schedule)

    @staticmethod
    def make_tracker(
        belief: Belief | None, bellman_model: BellmanModel | None, action_space: spaces.Discrete
    ) -> BeliefTracker | None:
        """What runs the user's filters; a belief's state is needed in replay where an exact model imagines other outcomes."""
        filters = [one for one in (belief, bellman_model) if one is not None]
        return BeliefTracker(filters, len(filters) == 2, int(action_space.n)) if filters else None

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
        self.random_encoder = RandomEncoder(**self._net_args(), has_memory=self.rnn_type != "none")
        self.aleatoric = self.make_aleatoric_flow()
        self.aleatoric_average = copy.deepcopy(self.aleatoric).requires_grad_(False) if self.averaging else None
        self.epistemic = EpistemicFlow(self.phi_dim, self.prior_distribution(), self.epistemic_hidden_size)
        self._n_hidden = len(self._initial_hidden(1))
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
        kwargs: dict[str, Any] = {
            "context_dim": latent_dim + n_actions + 1,
            "feature_dim": self.random_encoder.size + n_actions,
            "phi_dim": self.phi_dim,
            "hidden_size": self.aleatoric_hidden_size,
            "n_layers": self.aleatoric_layers,
            "prior_spread": self.prior_spread,
            "prior_variance": self.prior_variance,
        }
        return SliceFlow(**kwargs) if self.aleatoric_flow == "slice" else AleatoricFlow(n_bins=self.aleatoric_bins, **kwargs)

    def prior_distribution(self) -> Distribution:
        """The prior over phi."""
        return default_prior(self.phi_dim, self.prior_variance) if self.prior is None else self.prior

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

    def encode(
        self,
        obs: PyTorchObs,
        previous_actions: th.Tensor,
        previous_rewards: th.Tensor,
        hidden: Hidden | None = None,
        beliefs: th.Tensor | None = None,
        net: HistoryQNetwork | None = None,
    ) -> tuple[Encoding, Hidden]:
        """One recurrent pass of the Q-network and one of the random encoder over a batch of histories.

        :param obs: observations ``(T, B, ...)``
        :param previous_actions: ``(T, B)``, -1 where there was none
        :param previous_rewards: in the environment's units, ``(T, B)``
        :param hidden: what was remembered before, of both networks
        :param beliefs: features of the user's filters ``(T, B, size)``
        :param net: the Q-network, by default the one that learns
        """
        net = net or self.q_net
        own, fixed = (None, None) if hidden is None else (hidden[:-1], hidden[-1:])
        rewards = self.reward_units.standardize(previous_rewards)
        inputs = net.history_input(obs, previous_actions, rewards, beliefs)
        latent, q_values, own = net.evaluate(inputs, own)
        if self._learns_features:
            inputs = self.random_encoder.history_input(obs, previous_actions, rewards, beliefs)
        features, fixed = self.random_encoder(inputs, fixed)
        return Encoding(latent, q_values, features), (*own, *fixed)

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

    def _initial_hidden(self, n_envs: int) -> Hidden:
        """The state of both networks at the start of episodes."""
        return (*self.q_net.initial_hidden(n_envs), *self.random_encoder.initial_hidden(n_envs))

    def initial_memory(self, n_envs: int) -> Memory:
        """The memory of episodes that have just begun."""
        no_actions = th.full((n_envs,), NO_ACTION, dtype=th.long, device=self.device)
        beliefs = () if self.tracker is None else self.tracker.initial(n_envs)
        return Memory((*self._initial_hidden(n_envs), *(th.as_tensor(part, device=self.device) for part in beliefs)), no_actions)

    def step(
        self,
        obs: PyTorchObs,
        memory: Memory,
        rewards: th.Tensor,
        starts: th.Tensor | None,
        believed: Believed | None = None,
        net: HistoryQNetwork | None = None,
    ) -> tuple[Encoding, Hidden]:
        """Advance the memory by one observation of ``n`` episodes.

        :param obs: observations ``(n, ...)``
        :param memory: the memory after the last step
        :param rewards: previous rewards ``(n,)``, in the environment's units; NaN, for filters to see, where they are not known
        :param starts: which episodes begin with this observation ``(n,)``, ``None`` for none of them
        :param believed: what the user's filters say after this observation, where that is already known
        :param net: the Q-network, by default the one that learns
        :return: the encoded histories of n episodes and the hidden state to remember
        """
        hidden, actions = memory.hidden[: self._n_hidden], memory.actions
        if starts is not None:
            actions = actions.masked_fill(starts, NO_ACTION)
            hidden = select_rows(starts, self._initial_hidden(len(starts)), hidden)
        beliefs, state = None, cast(Hidden, ())
        if self.tracker is not None:
            believed = believed or self._believe(self.tracker, obs, memory.hidden[self._n_hidden :], actions, rewards, starts)
            beliefs = th.as_tensor(believed.features, device=actions.device)[None]
            state = tuple(th.as_tensor(part, device=actions.device) for part in believed.state)
            rewards = th.where(rewards.isnan(), self.reward_units.mean, rewards)
        obs = map_observations(lambda part: part[None], obs)
        encoding, hidden = self.encode(obs, actions[None], rewards[None], hidden, beliefs, net)
        return Encoding(*(part[0] for part in encoding)), (*hidden, *state)

    @staticmethod
    def _believe(
        tracker: BeliefTracker,
        obs: PyTorchObs,
        hidden: Hidden,
        actions: th.Tensor,
        rewards: th.Tensor,
        starts: th.Tensor | None,
    ) -> Believed:
        """What the user's filters say after an observation."""
        state = tuple(part.cpu().numpy() for part in hidden)
        if starts is not None:
            state = tracker.reset(state, starts.cpu().numpy())
        arrays = map_observations(lambda part: part.cpu().numpy(), obs)
        return tracker.advance(state, arrays, actions.cpu().numpy(), rewards.cpu().numpy())

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: RecurrentState | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, RecurrentState | None]:
        """Greedy actions and the memory to pass to the next call; see :meth:`sb3_ben.BEN.predict`."""
        encoding, hidden, vectorized = self.recall(observation, state, episode_start)
        actions = encoding.q_values.argmax(dim=-1).cpu().numpy() + int(self.action_space.start)
        return (actions if vectorized else actions.squeeze(axis=0)), self.remember(hidden, actions)

    @th.no_grad()
    def recall(
        self, observation: Any, state: RecurrentState | None, episode_start: np.ndarray | None
    ) -> tuple[Encoding, Hidden, bool]:
        """What ``predict`` and its relatives share: from numpy to encoded histories and memory.

        :return: encoded histories, hidden state, and whether the observation was a batch
        """
        if self.training:
            self.set_training_mode(False)
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
            raise ValueError(
                "predict() got a tuple instead of an observation. You are probably mixing Gym API with SB3 VecEnv API: "
                "`obs, info = env.reset()` (Gym) vs `obs = vec_env.reset()` (SB3 VecEnv)."
            )
        obs, vectorized = self.obs_to_tensor(observation)
        n_envs = len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)
        memory = self.initial_memory(n_envs) if state is None else self.memory_from(state, n_envs)
        starts = np.zeros(n_envs, dtype=bool) if episode_start is None else np.asarray(episode_start, dtype=bool).reshape(n_envs)
        rewards = self.rewards_of(observation, n_envs, is_first=state is None or bool(starts.all()))
        begins = th.as_tensor(starts, device=rewards.device) if starts.any() else None
        encoding, hidden = self.step(obs, memory, rewards, begins, net=self.acting_net)
        return encoding, hidden, vectorized

    def rewards_of(self, observation: Any, n_envs: int, is_first: bool) -> th.Tensor:
        """The previous rewards carried by the observation; where there are none, the mean reward seen in training."""
        rewards = previous_reward(observation)
        if rewards is not None and len(rewards) == n_envs:
            return th.as_tensor(rewards, dtype=th.float32, device=self.device)
        reads = self.rnn_type != "none" or self.tracker is not None
        if reads and not is_first and not self._warned and self.reward_units.var > 0 < self.reward_units.count:
            self._warned = True
            warnings.warn(
                "These observations carry no previous reward, which this agent reads: its mean is used instead. Use "
                "sb3_ben.evaluate_policy, or wrap the environment in sb3_ben.VecPreviousReward, for exact predictions.",
                stacklevel=4,
            )
        # a filter has its own way with what is not known
        return self.reward_units.mean.expand(n_envs) if self.tracker is None else th.full((n_envs,), th.nan, device=self.device)

    def memory_from(self, state: RecurrentState, n_envs: int) -> Memory:
        """The memory in the form in which the networks use it."""
        hidden, actions = state[:-1], state[-1]
        if len(actions) != n_envs:
            raise ValueError(f"`state` remembers {len(actions)} environments, but {n_envs} observations were given")
        device = self.device
        tensors = tuple(th.as_tensor(part, device=device) for part in hidden)
        return Memory(tensors, th.as_tensor(actions, dtype=th.long, device=device) - int(self.action_space.start))

    @staticmethod
    def remember(hidden: Hidden, actions: np.ndarray) -> RecurrentState:
        """The memory in the form in which callers carry it: arrays, the previous actions last."""
        return (*(part.cpu().numpy() for part in hidden), np.asarray(actions))

    def repeat(self, state: RecurrentState, n: int) -> RecurrentState:
        """The memory of one episode, n times."""
        hidden, beliefs = state[: self._n_hidden], state[self._n_hidden : -1]
        return (*(np.repeat(part, n, axis=1) for part in hidden), *(np.repeat(part, n, axis=0) for part in (*beliefs, state[-1])))

    @staticmethod
    def with_actions(state: RecurrentState | None, actions: np.ndarray) -> RecurrentState | None:
        """The memory of having executed other actions than the predicted ones."""
        return None if state is None else (*state[:-1], np.atleast_1d(actions))

    def forward(self, obs: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        return self._predict(obs, deterministic)

    def _predict(self, observation: PyTorchObs, deterministic: bool = True) -> th.Tensor:
        """Greedy actions at the beginning of an episode."""
        if self.tracker is None:
            return self.acting_net._predict(observation, deterministic)
        n_envs = len(next(iter(observation.values())) if isinstance(observation, dict) else observation)
        nothing = th.zeros(n_envs, device=self.device)
        encoding, _ = self.step(observation, self.initial_memory(n_envs), nothing, None, net=self.acting_net)
        return encoding.q_values.argmax(dim=-1) + int(self.action_space.start)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        names = (
            *("net_arch", "activation_fn", "rnn_type", "rnn_hidden_size", "n_rnn_layers", "phi_dim", "prior", "prior_variance"),
            *(
                "rnn_kwargs",
                "averaging",
                "prior_spread",
                "aleatoric_flow",
                "aleatoric_layers",
                "aleatoric_bins",
                "aleatoric_hidden_size",
                "epistemic_hidden_size",
                "belief",
                "bellman_model",
            ),
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
