"""Bootstrapped DQN with randomised prior functions (Osband et al., 2018) as a Stable-Baselines3 algorithm."""

from __future__ import annotations

import io
import pathlib
import sys
import warnings
from collections import defaultdict
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn, Schedule
from stable_baselines3.dqn import DQN

from sb3_ben.bootdqn.buffers import BootstrapDictReplayBuffer, BootstrapReplayBuffer
from sb3_ben.bootdqn.policies import BootDQNPolicy, CnnPolicy, EnsembleQNetwork, MlpPolicy, MultiInputPolicy
from sb3_ben.common.checks import check, check_count, check_number

__all__ = ["BootDQN"]

SelfBootDQN = TypeVar("SelfBootDQN", bound="BootDQN")


class BootDQN(DQN):
    """Bootstrapped DQN with randomised prior functions (BootDQN+prior).

    Papers: https://arxiv.org/abs/1806.03335, https://arxiv.org/abs/1602.04621

    An ensemble of Q-networks stands for the posterior over values. Each member is the sum of a trained network and of a random
    one that never changes, learns from its own bootstrap sample of the transitions and bootstraps from its own target network.
    In training, one member, drawn when the episode begins, acts for the whole episode: it explores deeply, without dithering.

    The loss is the squared error, as in the paper (SB3's DQN uses Huber's, which does not estimate means). Gradients are clipped
    member by member.

    :param policy: ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"`` or a policy class
    :param env: the environment to learn from (if registered in Gym, can be str)
    :param learning_rate: learning rate, a number or a function of the remaining progress (from 1 to 0)
    :param buffer_size: maximal number of transitions in the replay buffer
    :param learning_starts: number of steps with random actions before learning starts
    :param batch_size: number of transitions in each gradient step
    :param tau: soft update coefficient of the target networks, 1 for hard updates
    :param gamma: discount factor
    :param train_freq: update the model every ``train_freq`` steps, or a tuple like ``(5, "step")`` or ``(2, "episode")``
    :param gradient_steps: gradient steps after each rollout; -1 for as many as steps were made
    :param replay_buffer_class: by default :class:`~sb3_ben.bootdqn.buffers.BootstrapReplayBuffer` or its form for dictionaries;
        with other buffers, which store no masks, every member learns from every transition
    :param replay_buffer_kwargs: keyword arguments of the replay buffer
    :param optimize_memory_usage: whether to store observations only once, as in SB3
    :param n_steps: number of steps of the returns; with more than one, SB3's n-step buffer is used, which stores no masks
    :param target_update_interval: update the target networks every so many steps of the environments
    :param exploration_fraction: fraction of training over which epsilon is reduced
    :param exploration_initial_eps: initial probability of a random action beside the members' exploration
    :param exploration_final_eps: final probability of a random action
    :param max_grad_norm: maximal norm of the gradient of each member, and of the shared features extractor
    :param n_members: K, number of members
    :param prior_scale: by how much the fixed random priors are multiplied; 0 for bootstrapped DQN without priors
    :param mask_probability: probability with which a transition belongs to a member's bootstrap sample
    :param double_q: whether each member's network chooses the next action that its target network values (double Q-learning)
    :param stats_window_size: number of episodes that rollout statistics are averaged over
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments of the policy, see :class:`~sb3_ben.bootdqn.policies.BootDQNPolicy`
    :param verbose: verbosity level: 0 for no output, 1 for info messages, 2 for debug messages
    :param seed: seed of the pseudo random generators
    :param device: device on which the code should be run
    :param _init_setup_model: whether or not to build the network at the creation of the instance
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    q_net: EnsembleQNetwork  # type: ignore[assignment]
    q_net_target: EnsembleQNetwork  # type: ignore[assignment]
    policy: BootDQNPolicy

    def __init__(
        self,
        policy: str | type[BootDQNPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        buffer_size: int = 100_000,
        learning_starts: int = 100,
        batch_size: int = 64,
        tau: float = 1.0,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 4,
        gradient_steps: int = 1,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        target_update_interval: int = 500,
        exploration_fraction: float = 0.1,
        exploration_initial_eps: float = 0.0,
        exploration_final_eps: float = 0.0,
        max_grad_norm: float = 10.0,
        n_members: int = 20,
        prior_scale: float = 3.0,
        mask_probability: float = 0.5,
        double_q: bool = False,
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
            replay_buffer_class,
            replay_buffer_kwargs,
            optimize_memory_usage,
            n_steps,
            target_update_interval,
            exploration_fraction,
            exploration_initial_eps,
            exploration_final_eps,
            max_grad_norm,
            stats_window_size,
            tensorboard_log,
            policy_kwargs,
            verbose,
            seed,
            device,
            _init_setup_model=False,
        )
        self.n_members = n_members
        self.prior_scale = prior_scale
        self.mask_probability = mask_probability
        self.double_q = double_q
        #: the member that acts in each training environment's running episode
        self.active_members: np.ndarray | None = None
        if _init_setup_model:
            self._setup_model()

    # ------------------------------------------------------------------ set-up

    def _setup_model(self) -> None:
        self._check_arguments()
        self._choose_replay_buffer()
        policy_kwargs = self.policy_kwargs
        self.policy_kwargs = {**policy_kwargs, "n_members": self.n_members, "prior_scale": self.prior_scale}
        super()._setup_model()
        self.policy_kwargs = policy_kwargs  # as the user gave them: `load` compares

    def _check_arguments(self) -> None:
        check_count("n_members", self.n_members)
        check_number("prior_scale", self.prior_scale, 0, sys.float_info.max)
        check_number("mask_probability", self.mask_probability, sys.float_info.min, 1)
        for name in ("n_members", "prior_scale"):
            check(name not in self.policy_kwargs, f"`{name}` is an argument of BootDQN, not of `policy_kwargs`")

    def _choose_replay_buffer(self) -> None:
        """A buffer with masks, unless another class or n-step returns were asked for, which come without."""
        if self.replay_buffer_class is None and self.n_steps == 1:
            is_dict = isinstance(self.observation_space, spaces.Dict)
            self.replay_buffer_class = BootstrapDictReplayBuffer if is_dict else BootstrapReplayBuffer
        buffer_class = self.replay_buffer_class or NStepReplayBuffer
        if issubclass(buffer_class, BootstrapReplayBuffer):
            masks = {"n_members": self.n_members, "mask_probability": self.mask_probability}
            self.replay_buffer_kwargs = {**self.replay_buffer_kwargs, **masks}
        else:
            self._warn_maskless(buffer_class)

    def _warn_maskless(self, buffer_class: type[ReplayBuffer]) -> None:
        if self.mask_probability < 1:
            warnings.warn(
                f"`mask_probability={self.mask_probability}` is ignored because {buffer_class.__name__} stores no masks: every "
                "member learns from every transition. Pass `mask_probability=1` if that is what you want.",
                stacklevel=4,
            )

    def load_replay_buffer(self, path: str | pathlib.Path | io.BufferedIOBase, truncate_last_traj: bool = True) -> None:
        """As in SB3; the masks come with the buffer."""
        super().load_replay_buffer(path, truncate_last_traj)
        buffer = self.replay_buffer
        if buffer is not None and buffer.n_envs != self.n_envs:
            raise ValueError(f"The replay buffer holds {buffer.n_envs} environments, the model has {self.n_envs}")
        if isinstance(buffer, BootstrapReplayBuffer):
            fits = buffer.n_members == self.n_members
            check(fits, f"The replay buffer has masks of {buffer.n_members} members, the model has {self.n_members}")
        elif buffer is not None:
            self._warn_maskless(type(buffer))

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        resets = reset_num_timesteps or self._last_obs is None  # as the base class is about to decide
        result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        if resets or self.active_members is None or len(self.active_members) != self.n_envs:
            self._begin_episodes(np.ones(self.n_envs, dtype=bool))
        return result

    def learn(
        self: SelfBootDQN,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "BootDQN",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfBootDQN:
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    # ------------------------------------------------------------------ acting

    def _begin_episodes(self, starts: np.ndarray) -> None:
        """Draw the members of the environments whose episodes begin."""
        state = None if self.active_members is None or len(self.active_members) != len(starts) else (self.active_members,)
        self.active_members = self.policy.members_of(state, starts, len(starts))

    def collect_rollouts(self, env: Any, callback: BaseCallback, *args: Any, **kwargs: Any) -> RolloutReturn:
        rollout = super().collect_rollouts(env, callback, *args, **kwargs)
        if not rollout.continue_training:  # SB3 returns before it stores the last step, which may have ended episodes
            self._begin_episodes(callback.locals["dones"])
        return rollout

    def _store_transition(
        self,
        replay_buffer: ReplayBuffer,
        buffer_action: np.ndarray,
        new_obs: np.ndarray | dict[str, np.ndarray],
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
        self._begin_episodes(dones)

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Act by the members of the running episodes; at random during the warm-up."""
        if self.num_timesteps < learning_starts:
            return super()._sample_action(learning_starts, action_noise, n_envs)
        assert self._last_obs is not None, "learn() resets the environments before the first step"
        assert self.active_members is not None, "learn() draws the members before the first step"
        actions, _ = self.predict(self._last_obs, (self.active_members,), deterministic=False)
        return actions, actions

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Actions for observations.

        :param observation: one observation, or a batch of them
        :param state: what the last call returned: the member that acts in each environment (only if not deterministic); with
            ``None``, members are drawn
        :param episode_start: which environments have begun a new episode, for which another member is drawn
        :param deterministic: if True, maximise the mean of the members' values; if False, act as in training, by one member for
            each episode (and at random with the probability that training has come to, if epsilon is used at all)
        :return: actions and the next state
        """
        actions, state = self.policy.predict(observation, state, episode_start, deterministic)
        if not deterministic and self.exploration_rate > 0:
            is_random = np.random.random_sample(actions.shape) < self.exploration_rate
            start = int(self.policy.action_space.start)
            actions = np.where(is_random, start + np.random.randint(self.q_net.n_actions, size=actions.shape), actions)
        return actions, state

    def member_values(self, observation: np.ndarray | dict[str, np.ndarray]) -> np.ndarray:
        """What each member thinks of each action: ``(n_members, n_actions)``, for a batch ``(n_members, n, n_actions)``.

        Their standard deviation is the epistemic uncertainty::

            model = BootDQN("MlpPolicy", "DeepSea-v0").learn(1000)
            print(model.member_values(model.get_env().reset()).std(axis=0))
        """
        self.policy.set_training_mode(False)
        values, vectorized = self.policy.member_values(observation)
        return (values if vectorized else values.squeeze(1)).cpu().numpy()

    # ------------------------------------------------------------------ learning

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Gradient steps of all members at once, on one batch of transitions of which each sees its bootstrap sample."""
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        logs: dict[str, list[float]] = defaultdict(list)
        for _ in range(gradient_steps):
            samples: Any = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)  # type: ignore[union-attr]
            losses, spread = self._member_losses(samples)
            self.policy.optimizer.zero_grad()
            losses.sum().backward()
            self._clip_gradients()
            self.policy.optimizer.step()
            logs["train/loss"].append(losses.mean().item())
            logs["uncertainty/epistemic"].append(spread.item())
        self._n_updates += gradient_steps
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, values in logs.items():
            self.logger.record(name, float(np.mean(values)))

    def _member_losses(self, samples: Any) -> tuple[th.Tensor, th.Tensor]:
        """Each member's mean squared error on its transitions, and the mean standard deviation between the members' values."""
        targets = self._targets(samples)
        actions = samples.actions.long() - int(self.policy.action_space.start)
        values = self._at(self.q_net.member_values(samples.observations), actions.expand(self.n_members, -1, -1))
        errors = (values - targets) ** 2
        masks = getattr(samples, "masks", None)
        weights = th.ones_like(errors) if masks is None else masks.T
        losses = (weights * errors).sum(dim=1) / weights.sum(dim=1).clamp_min(1)
        return losses, values.detach().std(dim=0, correction=0).mean()

    @th.no_grad()
    def _targets(self, samples: Any) -> th.Tensor:
        """Every member's own Bellman samples ``(n_members, B)``."""
        next_values = self.q_net_target.member_values(samples.next_observations)
        chooser = self.q_net.member_values(samples.next_observations) if self.double_q else next_values
        next_values = self._at(next_values, chooser.argmax(dim=-1, keepdim=True))
        discounts = getattr(samples, "discounts", None)
        discounts = self.gamma if discounts is None else discounts.T
        return samples.rewards.T + (1 - samples.dones.T) * discounts * next_values

    @staticmethod
    def _at(values: th.Tensor, actions: th.Tensor) -> th.Tensor:
        return values.gather(-1, actions).squeeze(-1)

    def _clip_gradients(self) -> None:
        """Clip the gradient of each member on its own: what one of them learns does not slow down the others."""
        gradients = [parameter.grad for parameter in self.q_net.members.parameters() if parameter.grad is not None]
        norms = th.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        factors = (self.max_grad_norm / (norms + 1e-6)).clamp_max(1)
        for gradient in gradients:
            gradient.mul_(factors[:, None, None])
        shared = list(self.q_net.features_extractor.parameters())
        if shared:
            th.nn.utils.clip_grad_norm_(shared, self.max_grad_norm)
