"""SB3's off-policy loop for agents that read histories, which can be interrupted anywhere and resumed bit for bit."""

from __future__ import annotations

import io
import pathlib
import random
from collections.abc import Iterable
from typing import Any, TypeVar, cast

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn, TrainFreq
from stable_baselines3.common.utils import should_collect_more_steps
from stable_baselines3.common.vec_env import VecEnv

from sb3_ben.ben.policies import BENPolicy
from sb3_ben.common.checks import check_finite, check_model_file, check_spaces
from sb3_ben.common.saving import complete_file
from sb3_ben.history.previous_reward import VecPreviousReward, carry_in_evaluation
from sb3_ben.history.replay import HistoryReplayBuffer
from sb3_ben.history.samples import HistoryReplaySamples, as_histories
from sb3_ben.priors import Prior

__all__ = ["HistoryAlgorithm"]

SelfHistory = TypeVar("SelfHistory", bound="HistoryAlgorithm")


class HistoryAlgorithm(OffPolicyAlgorithm):
    """SB3's off-policy loop with four differences.

    Observations carry the previous reward. Numbers that are not finite are refused. A transition is stored before callbacks see
    it, and the progress of a rollout is kept in the model: what a callback saves in the middle of it is complete. Files are
    complete, too, or not there at all.
    """

    replay_buffer: HistoryReplayBuffer
    policy_class: type[BENPolicy]
    known: Prior
    n_steps: int
    sequence_length: int
    # how far the current rollout has come, what was stored, and what a loaded model has to put back before it goes on
    _rollout_steps, _rollout_episodes, _n_stored = 0, 0, 0
    _resume: dict[str, Any] | None = None

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """As in SB3, with the wrapper that carries the previous reward outermost."""
        check_spaces(env.observation_space, env.action_space)
        venv = OffPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        return venv if isinstance(venv, VecPreviousReward) else VecPreviousReward(venv)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        carry_in_evaluation(callback)
        return super()._init_callback(callback, progress_bar)

    def _setup_networks_and_buffer(self) -> None:
        """SB3's set-up. What the prior says and the windows of replay are passed on, but not kept among the user's arguments:
        they have places of their own."""
        given, n_steps = (self.policy_kwargs, self.replay_buffer_kwargs), self.n_steps
        parts = {"prior": self.known.phi, "belief": self.known.belief, "bellman_model": self.known.model}
        self.policy_kwargs = given[0] | {name: part for name, part in parts.items() if part is not None}
        tracker = BENPolicy.make_tracker(self.known.belief, self.known.model, cast(spaces.Discrete, self.action_space))
        if issubclass(self.replay_buffer_class or HistoryReplayBuffer, HistoryReplayBuffer):
            self.replay_buffer_kwargs = self.windows | given[1] | ({} if tracker is None else {"belief_dim": tracker.dim})
        self.n_steps = 1  # SB3 would leave returns over several steps to the buffer
        try:
            super()._setup_model()
        finally:
            (self.policy_kwargs, self.replay_buffer_kwargs), self.n_steps = given, n_steps

    @property
    def windows(self) -> dict[str, int]:
        """Arguments of the replay: how long histories are, and how soon those count that begin in the middle of an episode."""
        remembers = self.policy_class.remembers(self.policy_kwargs.get("rnn_type"))
        return {"sequence_length": self.sequence_length, "warm_up": self.sequence_length // 2 if remembers else 0}

    def _setup_learn(self, total_timesteps: int, *args: Any, **kwargs: Any) -> tuple[int, BaseCallback]:
        reset_num_timesteps = kwargs.get("reset_num_timesteps", args[1] if len(args) > 1 else True)
        is_fresh = reset_num_timesteps or self._last_obs is None
        self._go_on(is_fresh)
        total_timesteps, callback = super()._setup_learn(total_timesteps, *args, **kwargs)
        if self.replay_buffer.n_envs != self.n_envs:
            raise ValueError(f"The replay buffer holds {self.replay_buffer.n_envs} environments, the model has {self.n_envs}")
        self._check_learning()
        check_finite(self._last_obs, "observation")
        if is_fresh:
            self._start_episodes()
        return total_timesteps, callback

    def learn(
        self: SelfHistory,
        total_timesteps: int = 100_000,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "BEN",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfHistory:
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    def _start_episodes(self) -> None:
        """Every environment has been reset."""
        if isinstance(self.replay_buffer, HistoryReplayBuffer):
            self.replay_buffer.start_episodes()
        self._last_episode_starts = np.ones(self.n_envs, dtype=bool)
        self._rollout_steps, self._rollout_episodes = 0, 0

    def _check_learning(self) -> None:
        """Refuse what does not go together, before learning begins or goes on."""

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
        """As in SB3, with the differences of the class."""
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
        self._see_step(buffer_action, new_obs, original, dones, infos)
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
        self._n_stored = getattr(self.replay_buffer, "n_added", 0)
        self._last_episode_starts = np.array(dones, dtype=bool)

    def _see_step(self, action: np.ndarray, new_obs: Any, rewards: np.ndarray, dones: np.ndarray, infos: list[Any]) -> None:
        """A step has been made: its original rewards, before it is stored.

        :param action: what was done
        :param new_obs: what was seen then; where episodes ended, already of the next ones
        :param rewards: rewards, not normalised
        :param dones: which episodes ended
        :param infos: what else the environments told
        """

    def _sample_histories(self, batch_size: int) -> HistoryReplaySamples:
        """Histories from replay; of one step each, where the buffer knows no others."""
        samples: Any = self.replay_buffer.sample(batch_size, env=self._vec_normalize_env)
        is_history = isinstance(samples, HistoryReplaySamples)
        return samples if is_history else as_histories(samples, int(cast(spaces.Discrete, self.action_space).start))

    def _state(self) -> dict[str, Any]:
        """What an exact resume needs beside the parameters and SB3's own attributes."""
        rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": th.get_rng_state()}
        return {"rng": rng}

    def _set_state(self, state: dict[str, Any]) -> None:
        """Put it back."""
        random.setstate(state["rng"]["python"])
        np.random.set_state(state["rng"]["numpy"])
        th.set_rng_state(state["rng"]["torch"])

    def _go_on(self, is_fresh: bool = False) -> None:
        """Go on from where the model was saved, unless training begins anew."""
        if self._resume is not None and not is_fresh:
            self._set_state(self._resume)
        self._resume = None

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
        self._resume = pending or self._state()
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
    def load(cls: type[SelfHistory], path: str | pathlib.Path | io.BufferedIOBase, *args: Any, **kwargs: Any) -> SelfHistory:
        """As in SB3; a file that is not a model saved by BEN is refused with a ``ValueError``."""
        check_model_file(path)
        return super().load(path, *args, **kwargs)
