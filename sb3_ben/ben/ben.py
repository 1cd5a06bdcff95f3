"""The Bayesian Exploration Network (Fellows et al., ICML 2024) as a Stable-Baselines3 algorithm."""

from __future__ import annotations

import io
import pathlib
import random
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn, Schedule, TrainFreq
from stable_baselines3.common.utils import (
    FloatSchedule,
    LinearSchedule,
    configure_logger,
    get_parameters_by_name,
    polyak_update,
    should_collect_more_steps,
    update_learning_rate,
)
from stable_baselines3.common.vec_env import VecEnv
from torch.distributions import Distribution
from tqdm import tqdm  # type: ignore[import-untyped]

from sb3_ben.ben.arguments import check_arguments, check_prior
from sb3_ben.ben.exact import bellman_means
from sb3_ben.ben.objectives import (
    PAPER_BASE_PRECISION,
    add_noise,
    bellman_target,
    clamp_to_samples,
    disadvantages,
    kl_estimate,
    msbbe_double,
    msbbe_semi,
    negative_elbo,
    one_step_longer,
    total_variance,
)
from sb3_ben.ben.policies import (
    BENPolicy,
    CnnLstmPolicy,
    CnnPolicy,
    Encoding,
    MlpGruPolicy,
    MlpLstmPolicy,
    MlpPolicy,
    MultiInputLstmPolicy,
    MultiInputPolicy,
)
from sb3_ben.ben.pretraining import pretraining_stages
from sb3_ben.common.checks import check_count, check_finite, check_model_file, check_spaces
from sb3_ben.common.saving import complete_file
from sb3_ben.flows.epistemic import EpistemicFlow, RowAdam, StackedEpistemicFlow, prior_log_prob
from sb3_ben.history.previous_reward import VecPreviousReward, carry_in_evaluation
from sb3_ben.history.replay import HistoryReplayBuffer
from sb3_ben.history.samples import HistoryReplaySamples, as_histories, join_histories, terminal_observations
from sb3_ben.priors import Prior, PriorFactory
from sb3_ben.priors.filters import Believed
from sb3_ben.priors.models import with_last_observations
from sb3_ben.priors.simulations import simulate

__all__ = ["BEN", "BellmanDistribution"]

SelfBEN = TypeVar("SelfBEN", bound="BEN")

PRETRAIN_LOG_INTERVAL = 100  # steps of pre-training that logged values are averaged over
SPREAD = (0.02, 0.5)  # the epsilons of exploration="spread"; a quarter of the environments act at random


class BellmanDistribution(NamedTuple):
    """What BEN believes of the Bellman operator b, for each environment and action.

    :param mean: predictive mean, ``(n_envs, n_actions)``
    :param epistemic_std: standard deviation between hypotheses: what more data would settle
    :param aleatoric_std: standard deviation within a hypothesis: what the world leaves to chance
    :param samples: draws from the predictive distribution, ``(n_envs, n_actions, n_samples)``
    """

    mean: np.ndarray
    epistemic_std: np.ndarray
    aleatoric_std: np.ndarray
    samples: np.ndarray


class Encoded(NamedTuple):
    """Replayed transitions after the recurrent pass, in standardised units, with the dimensions of the posterior first.

    :param context: (h_t, a_t, q_t)
    :param q: Q(h_t, a_t)
    :param b: Bellman samples
    :param mask: 1 where there is a transition
    :param n_total: number of transitions that the posterior is conditioned on
    """

    context: th.Tensor
    q: th.Tensor
    b: th.Tensor
    mask: th.Tensor
    n_total: th.Tensor


class Estimate(NamedTuple):
    """What hypotheses drawn from the posterior say of replayed transitions.

    :param negative_elbo: per transition, to be minimised
    :param kl: KL(q || prior)
    :param phi: the hypotheses
    :param moments: mean and variance of b under each of them, without gradients; ``None`` where they were not asked for
    """

    negative_elbo: th.Tensor
    kl: th.Tensor
    phi: th.Tensor
    moments: tuple[th.Tensor, th.Tensor] | None


class BEN(OffPolicyAlgorithm):
    r"""Bayesian Exploration Network.

    Paper: https://arxiv.org/abs/2308.13049

    :param policy: ``"MlpLstmPolicy"``, ``"MlpGruPolicy"``, ``"CnnLstmPolicy"``, ``"MultiInputLstmPolicy"``, the history-free
        ``"MlpPolicy"``, ``"CnnPolicy"`` and ``"MultiInputPolicy"``, or a policy class
    :param env: the environment to learn from (if registered in Gym, can be str)
    :param learning_rate: learning rate of the Q-network, a number or a function of the remaining progress (from 1 to 0)
    :param buffer_size: maximal number of transitions in the replay buffer
    :param learning_starts: number of steps with random actions before learning starts
    :param batch_size: number of histories in each gradient step
    :param tau: soft update coefficient of the target network
    :param gamma: discount factor
    :param train_freq: update the model every ``train_freq`` steps, or a tuple like ``(5, "step")`` or ``(2, "episode")``
    :param gradient_steps: N_update, gradient steps after each rollout; -1 for as many as steps were made
    :param replay_buffer_class: :class:`~sb3_ben.history.replay.HistoryReplayBuffer` or a subclass
    :param replay_buffer_kwargs: keyword arguments of the replay buffer
    :param optimize_memory_usage: accepted for compatibility; observations are always stored only once
    :param n_steps: number of steps of the Bellman samples, :math:`r_t + \gamma r_{t+1} + \dots + \gamma^n \max_a Q(h_{t+n}, a)`,
        as far as a replayed history goes on. With more than one, values spread faster and lean less on their own errors, and what
        was explored on the way counts as if it had been best
    :param target_update_interval: update the target network every so many steps of the environments
    :param exploration_fraction: fraction of training over which epsilon is reduced
    :param exploration_initial_eps: initial probability of a random action
    :param exploration_final_eps: final probability of a random action
    :param max_grad_norm: maximal norm of the gradient
    :param sequence_length: t', maximal number of transitions in a replayed history
    :param burn_in: number of first transitions that are not learned from in replayed histories which begin in the middle of an
        episode: their only use is to fill the memory
    :param n_posterior_steps: N_posterior, steps on the ELBO for each step on the MSBBE
    :param n_pretrain_steps: N_pretrain, steps of Algorithm 2 before the first action, see :meth:`pretrain`
    :param n_phi_samples: hypotheses drawn from the posterior in each gradient step
    :param posterior_learning_rate: learning rate of the flows, a number or a schedule; ``None`` for three times ``learning_rate``
    :param belief_scope: ``"run"``: one posterior over all transitions replayed so far; ``"episode"``: each environment has its
        own, reset to the prior when an episode begins and fitted to that episode alone
    :param bellman: ``"flow"``: pull Q to the mean of the flows' predictive distribution; ``"point"``: to the Bellman samples
        themselves, which switches both flows off (a recurrent DQN, the control of our experiments); ``"model"``: to the
        predictive mean of the prior's exact model, which takes the place of both flows (and of ``"flow"`` where there is one)
    :param flow_weight: Q is pulled to the predictive mean with this weight and to the Bellman sample itself with the rest; 1 is
        the paper, and slow until the flows have learned to tell histories apart
    :param encoder_weight: weight of the likelihood's gradient in the encoder of histories, which Q shares with the flows; with 0
        the encoder learns from the MSBBE alone
    :param double_q: whether the Q-network chooses the next action that the target network values (double Q-learning), or the
        target network does both
    :param action_gap: from 0 to below 1: Bellman samples are lowered by this share of what the action is worth less than the best
        one (Bellemare et al., 2016). Greedy actions and their values stay what they are, and the gap to the others grows by up to
        1 / (1 - ``action_gap``): for problems where a detour costs little, and errors of Q decide
    :param action_gap_limit: the largest difference in value that counts for ``action_gap``, in the units of rewards. What is
        clearly worse need not be lowered further: where disasters are possible, they would set the scale of all values
    :param msbbe: ``"semi"``: semi-gradient to the predictive mean; ``"double"``: the paper's double sampling
    :param elbo: ``"exact"``, or ``"paper"`` for the ELBO as printed (an ablation: its posterior collapses)
    :param bellman_noise: standard deviation of the noise on Bellman samples before their density is taken, in standard
        deviations of b
    :param exploration: ``"epsilon"`` (annealed, tossed per environment), ``"spread"`` (a fixed range of epsilons over the
        environments), ``"posterior"`` (one hypothesis per episode) or ``"greedy"`` (the paper)
    :param prior: what is known before the first step: a distribution over phi, or a :class:`~sb3_ben.priors.Prior` with
        any of known transitions, simulations, an exact model and a belief; or a function that makes one for the environment, or
        its dotted name (for files of hyperparameters)
    :param stats_window_size: number of episodes that rollout statistics are averaged over
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments of the policy, see :class:`~sb3_ben.ben.policies.BENPolicy`
    :param verbose: verbosity level: 0 for no output, 1 for info messages, 2 for debug messages
    :param seed: seed of the pseudo random generators
    :param device: device on which the code should be run
    :param _init_setup_model: whether or not to build the network at the creation of the instance
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": MlpLstmPolicy,
        "MlpGruPolicy": MlpGruPolicy,
        "MlpPolicy": MlpPolicy,
        "CnnLstmPolicy": CnnLstmPolicy,
        "MultiInputLstmPolicy": MultiInputLstmPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    policy: BENPolicy
    policy_class: type[BENPolicy]
    replay_buffer: HistoryReplayBuffer

    def __init__(
        self,
        policy: str | type[BENPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        buffer_size: int = 100_000,
        learning_starts: int = 1000,
        batch_size: int = 16,
        tau: float = 0.2,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 4,
        gradient_steps: int = 1,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        target_update_interval: int = 32,
        exploration_fraction: float = 0.5,
        exploration_initial_eps: float = 1.0,
        exploration_final_eps: float = 0.05,
        max_grad_norm: float = 10.0,
        sequence_length: int = 32,
        burn_in: int = 0,
        n_posterior_steps: int = 1,
        n_pretrain_steps: int = 0,
        n_phi_samples: int = 4,
        posterior_learning_rate: float | Schedule | None = None,
        belief_scope: str = "run",
        bellman: str = "flow",
        flow_weight: float = 0.25,
        encoder_weight: float = 0.1,
        double_q: bool = False,
        action_gap: float = 0.0,
        action_gap_limit: float = float("inf"),
        msbbe: str = "semi",
        elbo: str = "exact",
        bellman_noise: float = 0.3,
        exploration: str = "epsilon",
        prior: Prior | Distribution | PriorFactory | str | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        super().__init__(
            policy,
            env,
            learning_rate,
            buffer_size,
            learning_starts,
            batch_size,
            tau,
            gamma,
            train_freq,
            gradient_steps,
            action_noise=None,
            replay_buffer_class=replay_buffer_class,
            replay_buffer_kwargs=replay_buffer_kwargs,
            optimize_memory_usage=optimize_memory_usage,
            policy_kwargs=policy_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            seed=seed,
            sde_support=False,
            supported_action_spaces=(spaces.Discrete,),
            support_multi_env=True,
        )
        self.n_steps = n_steps
        self.target_update_interval = target_update_interval
        self.exploration_fraction = exploration_fraction
        self.exploration_initial_eps = exploration_initial_eps
        self.exploration_final_eps = exploration_final_eps
        self.max_grad_norm = max_grad_norm
        self.sequence_length = sequence_length
        self.burn_in = burn_in
        self.n_posterior_steps = n_posterior_steps
        self.n_pretrain_steps = n_pretrain_steps
        self.n_phi_samples = n_phi_samples
        self.posterior_learning_rate = posterior_learning_rate
        self.belief_scope = belief_scope
        self.bellman = bellman
        self.flow_weight = flow_weight
        self.encoder_weight = encoder_weight
        self.double_q = double_q
        self.action_gap = action_gap
        self.action_gap_limit = action_gap_limit
        self.msbbe = msbbe
        self.elbo = elbo
        self.bellman_noise = bellman_noise
        self.exploration = exploration
        self.exploration_rate = 0.0
        self.prior = prior
        # What is remembered of the running episodes, and how far the current rollout has come: all that an exact resume needs
        self._memory: tuple[np.ndarray, ...] | None = None
        self._last_rewards: np.ndarray | None = None
        self._hypotheses: np.ndarray | None = None
        self._believed: Believed | None = None
        self._n_pretrained, self._simulation_seed = 0, 0
        self._rollout_steps, self._rollout_episodes, self._n_calls = 0, 0, 0
        self._n_stored = 0
        self._resume: dict[str, Any] | None = None
        if _init_setup_model:
            self._setup_model()

    # ------------------------------------------------------------------ set-up

    def _setup_model(self) -> None:
        self.set_random_seed(self.seed)  # of what a prior may draw
        self.prior = self.known = Prior.of(self.prior, self.env)
        check_arguments(self)
        self.replay_buffer_class = self.replay_buffer_class or HistoryReplayBuffer
        self._setup_networks_and_buffer()
        self.q_net, self.q_net_target = self.policy.q_net, self.policy.q_net_target
        self._running_stats = [get_parameters_by_name(net, ["running_"]) for net in (self.q_net, self.q_net_target)]
        if self.n_envs > self.target_update_interval:
            warnings.warn(
                f"The number of environments used is greater than the target network update interval ({self.n_envs} > "
                f"{self.target_update_interval}), therefore the target network is updated after each call to env.step(), "
                f"which corresponds to {self.n_envs} steps.",
                stacklevel=3,
            )
        rate = self.posterior_learning_rate
        self.posterior_lr_schedule = self._three_times_lr if rate is None else FloatSchedule(rate)
        self.exploration_schedule = LinearSchedule(
            self.exploration_initial_eps, self.exploration_final_eps, self.exploration_fraction
        )
        self.beliefs = StackedEpistemicFlow(self.policy.epistemic, self.n_envs).to(self.device)
        self.beliefs_optimizer = RowAdam(self.beliefs.psi.parameters(), lr=self.posterior_lr_schedule(1))

    def _setup_networks_and_buffer(self) -> None:
        """SB3's set-up. What the prior says and the windows of replay are passed on, but not kept among the user's arguments:
        they have places of their own."""
        given, n_steps = (self.policy_kwargs, self.replay_buffer_kwargs), self.n_steps
        parts = {"prior": self.known.phi, "belief": self.known.belief, "bellman_model": self.known.model}
        self.policy_kwargs = given[0] | {name: part for name, part in parts.items() if part is not None}
        tracker = BENPolicy.make_tracker(self.known.belief, self.known.model, cast(spaces.Discrete, self.action_space))
        if issubclass(self.replay_buffer_class or HistoryReplayBuffer, HistoryReplayBuffer):
            windows = {"sequence_length": self.sequence_length, "burn_in": self.burn_in}
            self.replay_buffer_kwargs = windows | given[1] | ({} if tracker is None else {"belief_dim": tracker.dim})
        self.n_steps = 1  # SB3 would leave returns over several steps to the buffer
        try:
            super()._setup_model()
        finally:
            (self.policy_kwargs, self.replay_buffer_kwargs), self.n_steps = given, n_steps
        self._simulated: HistoryReplayBuffer | None = None

    def _three_times_lr(self, progress_remaining: float) -> float:
        return 3 * self.lr_schedule(progress_remaining)

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """As in SB3, with the wrapper that carries the previous reward outermost."""
        check_spaces(env.observation_space, env.action_space)
        venv = OffPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        return venv if isinstance(venv, VecPreviousReward) else VecPreviousReward(venv)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        carry_in_evaluation(callback)
        return super()._init_callback(callback, progress_bar)

    def _setup_learn(self, total_timesteps: int, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        reset_num_timesteps = kwargs.get("reset_num_timesteps", args[1] if len(args) > 1 else True)
        is_fresh = reset_num_timesteps or self._last_obs is None
        if self._resume is not None and not is_fresh:
            self._continue_from(self._resume)
        self._resume = None
        total_timesteps, callback = super()._setup_learn(total_timesteps, *args, **kwargs)
        if self.replay_buffer.n_envs != self.n_envs:
            raise ValueError(f"The replay buffer holds {self.replay_buffer.n_envs} environments, the model has {self.n_envs}")
        check_prior(self)  # of the environment in use, which may have been set since
        check_finite(self._last_obs, "observation")
        if is_fresh:
            self._start_episodes()
        return total_timesteps, callback

    def _continue_from(self, saved: dict[str, Any]) -> None:
        """Put back what a save kept beside the parameters."""
        _set_rng_state(saved["rng"])
        self.beliefs.load_state_dict(saved["beliefs"]["flows"])
        self.beliefs_optimizer.load_state_dict(saved["beliefs"]["optimizer"])

    def _start_episodes(self) -> None:
        """Every environment has been reset."""
        if isinstance(self.replay_buffer, HistoryReplayBuffer):
            self.replay_buffer.start_episodes()
        self._memory, self._believed = None, None
        self._last_rewards = np.zeros(self.n_envs, dtype=np.float32)
        self._last_episode_starts = np.ones(self.n_envs, dtype=bool)
        self._rollout_steps, self._rollout_episodes = 0, 0
        if self.n_pretrain_steps > self._n_pretrained and self._n_updates == 0:
            self.pretrain(self.n_pretrain_steps - self._n_pretrained)

    def learn(
        self: SelfBEN,
        total_timesteps: int = 100_000,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "BEN",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfBEN:
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    # ------------------------------------------------------------------ acting

    def collect_rollouts(
        self,
        env: VecEnv,
        callback: BaseCallback,
        train_freq: TrainFreq,
        replay_buffer: ReplayBuffer,
        action_noise: ActionNoise | None = None,
        learning_starts: int = 0,
        log_interval: int | None = None,
    ) -> RolloutReturn:
        """As in SB3, except that a transition is stored before callbacks see it and that the progress of the rollout is kept in
        the model: what a callback saves in the middle of it is complete."""
        self.policy.set_training_mode(False)
        callback.on_rollout_start()
        while should_collect_more_steps(train_freq, self._rollout_steps, self._rollout_episodes):
            actions, buffer_actions = self._sample_action(learning_starts, action_noise, env.num_envs)
            new_obs, rewards, dones, infos = env.step(actions)
            self.num_timesteps += env.num_envs
            self._rollout_steps += 1
            self._rollout_episodes += int(dones.sum())
            self._update_info_buffer(infos, dones)
            self._store_transition(replay_buffer, buffer_actions, new_obs, rewards, dones, infos)  # type: ignore[arg-type]
            self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
            self._on_step()
            self._count_episodes(int(dones.sum()), log_interval)
            callback.update_locals(locals())
            if not callback.on_step():
                return RolloutReturn(self._rollout_steps * env.num_envs, self._rollout_episodes, continue_training=False)
        callback.on_rollout_end()
        rollout = RolloutReturn(self._rollout_steps * env.num_envs, self._rollout_episodes, continue_training=True)
        self._rollout_steps, self._rollout_episodes = 0, 0
        return rollout

    def _count_episodes(self, n_ended: int, log_interval: int | None) -> None:
        for _ in range(n_ended):
            self._episode_num += 1
            if log_interval is not None and self._episode_num % log_interval == 0:
                self.dump_logs()

    def _on_step(self) -> None:
        """Update the target network and epsilon, after each step of the environments."""
        self._n_calls += 1
        if self._n_calls % max(self.target_update_interval // self.n_envs, 1) == 0:
            polyak_update(self.q_net.parameters(), self.q_net_target.parameters(), self.tau)
            polyak_update(self._running_stats[0], self._running_stats[1], 1.0)  # of batch normalisation layers
        self.exploration_rate = self.exploration_schedule(self._current_progress_remaining)
        if self.exploration == "epsilon":
            self.logger.record("rollout/exploration_rate", self.exploration_rate)

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Explore. The memory advances on every action, the random ones of the warm-up too."""
        if self.belief_scope == "episode":
            starts = th.as_tensor(self._last_episode_starts, device=self.device)
            self.beliefs.reset(starts)
            self.beliefs_optimizer.reset(starts)
        encoding, hidden = self._recall()
        values = self._sampled_values(encoding) if self.exploration == "posterior" else encoding.q_values
        actions = values.argmax(dim=-1).cpu().numpy()
        is_random = np.random.rand(n_envs) < self._epsilons(n_envs, warm_up=self.num_timesteps < learning_starts)
        actions = np.where(is_random, np.random.randint(self.policy.q_net.n_actions, size=n_envs), actions)
        actions = actions + int(self.policy.action_space.start)
        self._memory = self.policy.remember(hidden, actions)
        return actions, actions

    @th.no_grad()
    def _recall(self) -> tuple[Encoding, tuple[th.Tensor, ...]]:
        """Encoded histories of the training environments and the memory after their last observations."""
        assert self._last_obs is not None, "learn() resets the environments before the first step"
        policy = self.policy
        memory = policy.initial_memory(self.n_envs) if self._memory is None else policy.memory_from(self._memory, self.n_envs)
        obs, _ = policy.obs_to_tensor(self._last_obs)
        if policy.tracker is not None:
            self._believed = policy.tracker.restart(self._believed, self._last_obs, np.asarray(self._last_episode_starts))
        starts = th.as_tensor(self._last_episode_starts, device=self.device)
        return policy.step(obs, memory, th.as_tensor(self._last_rewards, device=self.device), starts, self._believed)

    def _epsilons(self, n_envs: int, warm_up: bool) -> np.ndarray | float:
        """The probability of a random action, by environment."""
        if warm_up:
            return 1.0
        if self.exploration == "spread":
            n_random = n_envs // 4
            return np.concatenate((np.ones(n_random), np.geomspace(*SPREAD[::-1], n_envs - n_random)))
        return self.exploration_rate if self.exploration == "epsilon" else 0.0

    @th.no_grad()
    def _sampled_values(self, encoding: Encoding) -> th.Tensor:
        """The expected b of every action under the hypothesis of each environment's episode."""
        if self._hypotheses is None or self._hypotheses.shape[0] != self.n_envs:
            self._hypotheses = np.zeros((self.n_envs, self.policy.phi_dim), dtype=np.float32)
        starts = np.asarray(self._last_episode_starts)
        if starts.any():
            phi, _ = self.policy.epistemic.rsample_and_log_prob(int(starts.sum()))
            self._hypotheses[starts] = phi.cpu().numpy()
        context = self._contexts_of_all_actions(encoding)
        return self.policy.aleatoric.mean(context, th.as_tensor(self._hypotheses, device=self.device)[:, None])[:, 0]

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        normalize = self._vec_normalize_env
        original = np.asarray(reward if normalize is None else normalize.get_original_reward(), dtype=np.float32)
        check_finite(original, "reward")
        check_finite(new_obs, "observation")
        for i in np.flatnonzero(dones):  # of these, the new observation belongs to the next episode
            check_finite(infos[i].get("terminal_observation", 0.0), "last observation of an episode")
        if self.policy.tracker is not None:
            self._advance_beliefs(buffer_action, new_obs, original, dones, infos)
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
        self._n_stored = getattr(self.replay_buffer, "n_added", 0)
        self.policy.reward_units.update(th.as_tensor(original, device=self.device))
        self._last_rewards = original
        self._last_episode_starts = np.array(dones, dtype=bool)

    def _advance_beliefs(
        self,
        actions: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        rewards: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        """Let the user's filters see a step: its end, for the next action, and both ends, for the buffer."""
        tracker, now = self.policy.tracker, self._believed
        assert tracker is not None
        assert now is not None, "filters see every observation before an action is chosen"
        successors = terminal_observations(new_obs, dones, infos)
        self._believed = tracker.advance(now.state, successors, actions - int(self.policy.action_space.start), rewards)
        self.replay_buffer.add_beliefs(now.features, self._believed.features)

    # ------------------------------------------------------------------ learning

    def train(self, gradient_steps: int, batch_size: int = 16) -> None:
        """Algorithm 1 of the paper: for each of N_update steps, N_posterior steps on the ELBO and one on the MSBBE."""
        self.policy.set_training_mode(True)
        self._update_learning_rates()
        logs: dict[str, list[float]] = defaultdict(list)
        for _ in range(gradient_steps):
            for name, value in self._update(self._replay(batch_size)).items():
                logs[name].append(value)
            self._n_updates += 1
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, values in logs.items():
            self.logger.record(name, float(np.mean(values)))

    def _update(self, histories: HistoryReplaySamples) -> dict[str, float]:
        """N_posterior steps on the ELBO and one on the MSBBE of a batch of histories."""
        if self.bellman == "model":
            return self._model_step(with_last_observations(histories))
        encoding, _ = self._encode(histories)
        b = self._bellman_samples(histories, encoding.q_values)
        encoded = self._arrange(histories, Encoding(*(part[:-1] for part in encoding)), b)
        for _ in range(self.n_posterior_steps - 1):
            self._posterior_step(encoded)
        logs = self._joint_step(encoded)
        self.policy.update_bellman_units(b, histories.mask)
        return logs

    def _encode(self, histories: HistoryReplaySamples) -> tuple[Encoding, tuple[th.Tensor, ...]]:
        """Replayed histories after one recurrent pass."""
        observed = (histories.observations, histories.previous_actions, histories.previous_rewards)
        return self.policy.encode(*observed, beliefs=histories.beliefs)

    def _model_step(self, histories: HistoryReplaySamples) -> dict[str, float]:
        """A step on the MSBBE of all actions, with the exact model of the prior in place of the flows."""
        policy, (encoding, _) = self.policy, self._encode(histories)
        means = bellman_means(policy, histories, self.gamma)
        mask = histories.mask[..., None].expand_as(means)
        if policy.bellman_units.count == 0:
            policy.update_bellman_units(means, mask)
        msbbe = msbbe_semi(encoding.q_values[:-1], policy.bellman_units.standardize(means), mask)
        self._descend(msbbe)
        policy.update_bellman_units(means, mask)
        return {"train/loss": msbbe.item(), "train/msbbe": msbbe.item()}

    def _update_learning_rates(self) -> None:
        self._update_learning_rate(self.policy.optimizer)
        rate = self.posterior_lr_schedule(self._current_progress_remaining)
        self.logger.record("train/posterior_learning_rate", rate)
        for optimizer in (self.policy.posterior_optimizer, self.beliefs_optimizer):
            update_learning_rate(optimizer, rate)

    def _replay(self, batch_size: int) -> HistoryReplaySamples:
        """Histories to learn from: replayed ones, or the running episodes where each has a belief of its own."""
        if self.belief_scope == "episode":
            return self.replay_buffer.running_episodes(env=self._vec_normalize_env)
        n_simulated = self._n_simulated(batch_size)
        if n_simulated == batch_size:
            return self.simulated.sample(batch_size, env=self._vec_normalize_env)
        samples: Any = self.replay_buffer.sample(batch_size - n_simulated, env=self._vec_normalize_env)
        is_history = isinstance(samples, HistoryReplaySamples)
        histories = samples if is_history else as_histories(samples, int(self.policy.action_space.start))
        if not n_simulated:
            return histories
        return join_histories(histories, self.simulated.sample(n_simulated, env=self._vec_normalize_env))

    def _n_simulated(self, batch_size: int) -> int:
        """How many histories of a batch are simulated ones."""
        return 0 if self.known.simulations is None else round(self.known.simulations.fraction * batch_size)

    @property
    def simulated(self) -> HistoryReplayBuffer:
        """The simulated histories of the prior. They are not saved but simulated again, with the same seed, when needed."""
        if self._simulated is None:
            assert self.known.simulations is not None
            self._simulation_seed = self._simulation_seed or int(np.random.randint(1, 2**31))
            kwargs = {"observation_space": self.observation_space, "action_space": self.action_space, "device": self.device}
            kwargs |= {"sequence_length": self.sequence_length, "burn_in": self.burn_in}
            self._simulated = simulate(self.known.simulations, kwargs, self.policy.tracker, self._simulation_seed)
        return self._simulated

    @th.no_grad()
    def _bellman_samples(self, histories: HistoryReplaySamples, q_values: th.Tensor) -> th.Tensor:
        """Samples b_t of the optimal Bellman operator, in the units of rewards.

        :param q_values: the Q-network's values ``(T + 1, B, n_actions)``, by which ``double_q`` chooses the next actions
        """
        policy = self.policy
        rewards = policy.reward_units.standardize(histories.previous_rewards)
        _, values, _ = policy.q_net_target(histories.observations, histories.previous_actions, rewards, beliefs=histories.beliefs)
        chosen = (q_values if self.double_q else values)[1:].argmax(dim=-1, keepdim=True)
        next_values = policy.bellman_units.unstandardize(values[1:].gather(-1, chosen)[..., 0])
        rewards = self._expected_rewards(histories)
        b = bellman_target(rewards, histories.dones, next_values, self.gamma)
        for _ in range(self.n_steps - 1):
            b = one_step_longer(b, rewards, histories.dones, histories.mask, self.gamma)
        if self.action_gap:
            values = policy.bellman_units.std * values[:-1]
            b = b - self.action_gap * disadvantages(values, histories.actions, self.action_gap_limit)
        if policy.bellman_units.count == 0:
            policy.update_bellman_units(b, histories.mask)
        return b

    def _expected_rewards(self, histories: HistoryReplaySamples) -> th.Tensor:
        """What a filter of the user's expected of the actions, where it says so; the rewards that came, where not."""
        tracker = self.policy.tracker
        if tracker is None or not tracker.n_rewards or histories.beliefs is None:
            return histories.rewards
        return tracker.expected_rewards(histories.beliefs[:-1], histories.actions)

    def _arrange(self, histories: HistoryReplaySamples, encoding: Encoding, b: th.Tensor) -> Encoded:
        """The transitions of encoded histories, with the dimensions of the posterior first."""
        policy = self.policy
        parts: tuple[th.Tensor, ...] = (*encoding, histories.actions, b, histories.mask)
        if self.belief_scope == "episode":  # (E, T, ...): one row for each environment's own posterior
            parts = tuple(part.transpose(0, 1) for part in parts)
            n_total = parts[-1].sum(dim=-1)
        else:  # what does not count, padding and burn-in, is left out: the flows would take as long for it
            counts = histories.mask.flatten() > 0
            counts[0] = True  # something has to be there, in a batch where nothing counts as well
            parts = tuple(part.flatten(0, 1)[counts] for part in parts)
            n_transitions = self.replay_buffer.size() * self.n_envs + self._n_simulated_transitions
            n_total = th.tensor(float(n_transitions), device=self.device)
        latent, q_values, features, actions, b, mask = parts
        context = policy.context(Encoding(latent, q_values, features), actions, detach_q=self.msbbe == "semi")
        q = q_values.gather(-1, actions[..., None])[..., 0]
        return Encoded(context, q, policy.bellman_units.standardize(b), mask, n_total)

    @property
    def _n_simulated_transitions(self) -> int:
        """How many simulated transitions the posterior is conditioned on: none, once training goes on without them."""
        simulations, buffer = self.known.simulations, self._simulated
        if simulations is None or buffer is None or (simulations.fraction == 0 and self.replay_buffer.size() > 0):
            return 0
        return buffer.size() * buffer.n_envs

    @property
    def posterior(self) -> EpistemicFlow | StackedEpistemicFlow:
        """The posterior that is being fitted: one for the run, or one for each environment's episode."""
        return self.beliefs if self.belief_scope == "episode" else self.policy.epistemic

    def _negative_elbo(self, encoded: Encoded, with_moments: bool = True) -> Estimate:
        """The negative ELBO per transition, and what else its hypotheses tell; the moments only where they are asked for."""
        phi, log_q = self.posterior.rsample_and_log_prob(self.n_phi_samples)
        log_prior = prior_log_prob(self.policy.prior_distribution(), phi)
        precision = PAPER_BASE_PRECISION if self.elbo == "paper" else 1.0
        blurred = add_noise(encoded.b, self.bellman_noise)
        aleatoric, arguments = self.policy.aleatoric, (blurred, encoded.context, phi, precision)
        log_likelihood, moments = (
            aleatoric.log_prob_and_moments(*arguments) if with_moments else (aleatoric.log_prob(*arguments), None)
        )
        scale = encoded.n_total / encoded.mask.sum(dim=-1).clamp_min(1)
        loss = negative_elbo(log_likelihood, log_prior, log_q, scale, encoded.mask, self.elbo) / encoded.n_total
        return Estimate(loss.mean(), kl_estimate(log_q, log_prior).mean(), phi.detach(), moments)

    def _posterior_step(self, encoded: Encoded) -> None:
        """A step on the ELBO for the flows alone."""
        if self.bellman == "flow":
            detached = encoded._replace(context=encoded.context.detach())
            self._descend(self._negative_elbo(detached, with_moments=False).negative_elbo)

    def _joint_step(self, encoded: Encoded) -> dict[str, float]:
        """A step on the ELBO, through the encoder as well, and a step on the MSBBE."""
        if self.bellman == "point":
            msbbe = msbbe_semi(encoded.q, encoded.b, encoded.mask)
            self._descend(msbbe)
            return {"train/loss": msbbe.item(), "train/msbbe": msbbe.item()}
        # the value of the context itself, whatever the weight: only its gradient is scaled
        context = th.lerp(encoded.context.detach(), encoded.context, self.encoder_weight)
        estimate = self._negative_elbo(encoded._replace(context=context))
        msbbe, uncertainty = self._msbbe(encoded, estimate)
        loss = estimate.negative_elbo + msbbe
        self._descend(loss)
        logs = {
            "train/loss": loss,
            "train/elbo": -estimate.negative_elbo,
            "train/msbbe": msbbe,
            "train/kl": estimate.kl,
            **uncertainty,
        }
        return {name: value.item() for name, value in logs.items()}

    def _msbbe(self, encoded: Encoded, estimate: Estimate) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """The mean squared Bayesian Bellman error, and both uncertainties, in the units of rewards."""
        aleatoric, unit = self.policy.aleatoric, self.policy.bellman_units.std
        assert estimate.moments is not None
        mean, epistemic, chance = total_variance(*estimate.moments)
        logs = {"uncertainty/epistemic": epistemic, "uncertainty/aleatoric": chance}
        logs = {name: unit * (value * encoded.mask).sum() / encoded.mask.sum() for name, value in logs.items()}
        if self.msbbe == "semi":
            mean = clamp_to_samples(mean, encoded.b, encoded.mask)
            return msbbe_semi(encoded.q, th.lerp(encoded.b, mean, self.flow_weight), encoded.mask), logs
        with th.no_grad():
            other, _ = self.posterior.rsample_and_log_prob(1)
        aleatoric.requires_grad_(False)  # the MSBBE is minimised over Q alone: flows that followed it would predict what Q wants
        b1, b2 = (aleatoric.rsample(encoded.context, one, 1)[..., 0, :, 0] for one in (estimate.phi[..., :1, :], other))
        aleatoric.requires_grad_(True)
        return msbbe_double(encoded.q, b1, b2, encoded.mask), logs

    def _descend(self, loss: th.Tensor) -> None:
        """A gradient step on whatever the loss depends on."""
        optimizers = [self.policy.optimizer, self.policy.posterior_optimizer]
        if self.belief_scope == "episode":
            optimizers.append(self.beliefs_optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for parameters in (self.policy.parameters(), self.beliefs.psi.parameters()):
            th.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        self.policy.average_weights()

    def pretrain(self: SelfBEN, n_steps: int, callback: MaybeCallback = None, progress_bar: bool = False) -> SelfBEN:
        """Algorithm 2 of the paper: minimise the MSBBE under the prior before the first action.

        Each step takes what the prior offers: the MSBBE of first observations under the model or the prior over phi (unless
        simulations know better what follows them), of known transitions, and a step of Algorithm 1 on simulated histories.
        Without any of these (``bellman="point"`` and no prior) there is nothing to learn from, which is an error.

        :param n_steps: N_pretrain
        :param callback: called after every step
        :param progress_bar: whether to show a progress bar
        """
        if n_steps < 0:
            raise ValueError(f"`n_steps` must not be negative, got {n_steps}")
        if self._resume is not None:
            self._continue_from(self._resume)
            self._resume = None
        if not hasattr(self, "_logger"):
            self._logger = configure_logger(self.verbose, self.tensorboard_log, "BEN", True)
        stages = pretraining_stages(self)
        watcher = self._init_callback(callback)
        watcher.on_training_start(locals(), globals())
        self._update_learning_rates()
        for _ in tqdm(range(n_steps), disable=not progress_bar):
            self.policy.set_training_mode(True)  # callbacks that evaluate switch it off
            for stage in stages:
                for name, value in stage().items():
                    self.logger.record_mean(f"pretrain/{name}", value)
            self._n_pretrained += 1
            self.logger.record("pretrain/n_steps", self._n_pretrained, exclude="tensorboard")
            if self._n_pretrained % PRETRAIN_LOG_INTERVAL == 0:
                self.logger.dump(self._n_pretrained)
            watcher.update_locals(locals())
            if not watcher.on_step():
                break
        watcher.on_training_end()
        self.policy.q_net_target.load_state_dict(self.policy.q_net.state_dict())
        return self

    def _follow_target(self) -> None:
        """Let the target network follow, after each step of pre-training with Bellman samples."""
        polyak_update(self.q_net.parameters(), self.q_net_target.parameters(), self.tau)

    # ------------------------------------------------------------------ what the user sees

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Actions for observations and what to remember of them.

        :param observation: one observation, or a batch of them
        :param state: what the last call returned, ``None`` for a fresh memory; its last entry are the previous actions, to be
            overwritten by a caller who executes others
        :param episode_start: which environments have begun a new episode
        :param deterministic: if False, act at random with the probability that training has come to (epsilon)
        :return: actions and the next state
        """
        actions, state = self.policy.predict(observation, state, episode_start, deterministic)
        if not deterministic and self.exploration_rate > 0 and self.exploration == "epsilon":
            is_random = np.random.rand(*actions.shape) < self.exploration_rate
            start, n_actions = int(self.policy.action_space.start), self.policy.q_net.n_actions
            actions = np.where(is_random, start + np.random.randint(n_actions, size=actions.shape), actions)
            state = self.policy.with_actions(state, actions)
        return actions, state

    @th.no_grad()
    def bellman_distribution(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        n_samples: int = 256,
    ) -> BellmanDistribution:
        """What BEN believes of the Bellman operator after a history, for every action.

        The total variance of b splits into the spread between hypotheses (epistemic) and within them (aleatoric)::

            model = BEN("MlpLstmPolicy", "Tiger-v0").learn(10_000)
            obs = model.get_env().reset()
            beliefs = model.bellman_distribution(obs)
            print(beliefs.mean, beliefs.epistemic_std, beliefs.aleatoric_std)

        With ``belief_scope="episode"`` the hypotheses are those of the prior, since the observation belongs to no fitted episode.

        :param observation: one observation, or a batch of them
        :param state: the state that came with it, as for :meth:`predict`
        :param episode_start: which environments have begun a new episode
        :param n_samples: number of draws, and of hypotheses that the moments are estimated with
        """
        if self.bellman != "flow":
            raise ValueError(f"A model with bellman={self.bellman!r} has no distribution of b: its flows are switched off")
        check_count("n_samples", n_samples)
        policy, flow = self.policy, self.policy.acting_flow
        encoding, _, vectorized = policy.recall(observation, state, episode_start)
        context = self._contexts_of_all_actions(encoding)
        phi, _ = policy.epistemic.rsample_and_log_prob(n_samples)
        moments = total_variance(*flow.moments(context.flatten(0, 1), phi))
        samples = flow.sample(context.flatten(0, 1), phi, 1)[..., 0].T
        unit, shape = policy.bellman_units.std, context.shape[:2]
        parts = [policy.bellman_units.unstandardize(moments[0]), unit * moments[1], unit * moments[2]]
        parts = [*(part.view(shape) for part in parts), policy.bellman_units.unstandardize(samples).view(*shape, n_samples)]
        return BellmanDistribution(*(part.cpu().numpy() if vectorized else part[0].cpu().numpy() for part in parts))

    def _contexts_of_all_actions(self, encoding: Encoding) -> th.Tensor:
        """Contexts ``(n, n_actions, ...)`` of every action after each of n histories."""
        n_envs, n_actions = encoding.q_values.shape
        actions = th.arange(n_actions, device=self.device).expand(n_envs, n_actions)
        repeated = Encoding(*(part[:, None].expand(-1, n_actions, -1) for part in encoding))
        return self.policy.context(repeated, actions)

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """As in SB3. The state of the random generators is saved too: with the replay buffer, an environment in the same state
        and ``load(..., force_reset=False)``, ``learn(..., reset_num_timesteps=False)`` continues as if never interrupted. (The
        state of an environment is its own matter: ``VecNormalize.save``, for one, leaves out the running returns by which rewards
        are normalised.) A file of that name is replaced once the new one is complete."""
        pending = self._resume  # of a model that was loaded and has not gone on yet
        beliefs = {"flows": self.beliefs.state_dict(), "optimizer": self.beliefs_optimizer.state_dict()}
        self._resume = pending or {"rng": _get_rng_state(), "beliefs": beliefs}
        try:
            with complete_file(path, "zip") as unfinished:
                super().save(unfinished, exclude, include)
        finally:
            self._resume = pending

    def save_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase) -> None:
        """As in SB3. A file of that name is replaced once the new one is complete."""
        with complete_file(path, "pkl") as unfinished:
            super().save_replay_buffer(unfinished)

    def load_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase, truncate_last_traj: bool = True) -> None:
        """As in SB3. Episodes that are running now go on in the buffer only if they were running when it was saved."""
        super().load_replay_buffer(path, truncate_last_traj)
        if isinstance(self.replay_buffer, HistoryReplayBuffer) and self.replay_buffer.n_added != self._n_stored:
            self.replay_buffer.start_episodes()

    @classmethod
    def load(cls: type[SelfBEN], path: str | pathlib.Path | io.BufferedIOBase, *args: Any, **kwargs: Any) -> SelfBEN:
        """As in SB3; a file that is not a model saved by BEN is refused with a ``ValueError``."""
        check_model_file(path)
        return super().load(path, *args, **kwargs)

    def _excluded_save_params(self) -> list[str]:
        return [
            *super()._excluded_save_params(),
            "beliefs",
            "beliefs_optimizer",
            "posterior_lr_schedule",
            "q_net",
            "q_net_target",
            "_running_stats",
            "known",
            "_simulated",
        ]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.optimizer", "policy.posterior_optimizer"], []


def _get_rng_state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": th.get_rng_state()}


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    th.set_rng_state(state["torch"])
