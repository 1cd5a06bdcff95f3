"""The Bayesian Exploration Network (Fellows et al., ICML 2024) as a Stable-Baselines3 algorithm."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import (
    LinearSchedule,
    configure_logger,
    get_parameters_by_name,
    polyak_update,
    update_learning_rate,
)
from torch.distributions import Distribution
from tqdm import tqdm  # type: ignore[import-untyped]

from sb3_ben.ben.acting import EXPLORATIONS, sometimes_random
from sb3_ben.ben.arguments import check_arguments, check_prior, operator_of
from sb3_ben.ben.base import HistoryAlgorithm
from sb3_ben.ben.distribution import BellmanDistribution, distribution_of
from sb3_ben.ben.learning import Batch, Operator, Rule, Seen
from sb3_ben.ben.policies import ALIASES, BENPolicy
from sb3_ben.ben.pretraining import pretraining_stages
from sb3_ben.common.checks import check_count
from sb3_ben.history.replay import HistoryReplayBuffer
from sb3_ben.history.samples import HistoryReplaySamples, join_histories, terminal_observations
from sb3_ben.priors import Prior, PriorFactory
from sb3_ben.priors.filters import Believed
from sb3_ben.priors.simulations import simulate

__all__ = ["BEN", "BellmanDistribution"]

SelfBEN = TypeVar("SelfBEN", bound="BEN")

FLOW_LEARNING_RATE = 3  # times that of the Q-network: the paper's two timescales
PRETRAIN_LOG_INTERVAL = 100  # steps of pre-training that logged values are averaged over


class BEN(HistoryAlgorithm):
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
    :param n_posterior_steps: N_posterior, steps on the ELBO for each step on the MSBBE
    :param n_pretrain_steps: N_pretrain, steps of Algorithm 2 before the first action, see :meth:`pretrain`
    :param n_phi_samples: hypotheses drawn from the posterior in each gradient step
    :param bellman: ``"flow"``: pull Q to the mean of the flows' predictive distribution; ``"point"``: to the Bellman samples
        themselves, which switches both flows off (a recurrent DQN, the control of our experiments); ``"model"``: to the
        predictive mean of the prior's exact model, which takes the place of both flows (and of ``"flow"`` where there is one)
    :param double_q: whether the Q-network chooses the next action that the target network values (double Q-learning), or the
        target network does both
    :param action_gap: from 0 to below 1: Bellman samples are lowered by this share of what the action is worth less than the best
        one (Bellemare et al., 2016). Greedy actions and their values stay what they are, and the gap to the others grows by up to
        1 / (1 - ``action_gap``): for problems where a detour costs little, and errors of Q decide
    :param action_gap_limit: the largest difference in value that counts for ``action_gap``, in the units of rewards. What is
        clearly worse need not be lowered further: where disasters are possible, they would set the scale of all values
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

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = ALIASES
    policy: BENPolicy
    policy_class: type[BENPolicy]
    replay_buffer: HistoryReplayBuffer
    operator: Operator

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
        n_posterior_steps: int = 1,
        n_pretrain_steps: int = 0,
        n_phi_samples: int = 4,
        bellman: str = "flow",
        double_q: bool = False,
        action_gap: float = 0.0,
        action_gap_limit: float = float("inf"),
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
            None,  # action noise
            replay_buffer_class,
            replay_buffer_kwargs,
            optimize_memory_usage,
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
        self.n_steps, self.sequence_length = n_steps, sequence_length
        self.target_update_interval, self.max_grad_norm = target_update_interval, max_grad_norm
        self.exploration_fraction, self.exploration_rate = exploration_fraction, 0.0
        self.exploration_initial_eps, self.exploration_final_eps = exploration_initial_eps, exploration_final_eps
        self.n_posterior_steps, self.n_pretrain_steps, self.n_phi_samples = n_posterior_steps, n_pretrain_steps, n_phi_samples
        self.bellman, self.exploration, self.prior = bellman, exploration, prior
        self.double_q, self.action_gap, self.action_gap_limit = double_q, action_gap, action_gap_limit
        # what is remembered of the running episodes: an exact resume needs it
        self._memory: tuple[np.ndarray, ...] | None = None
        self._believed: Believed | None = None
        self._n_pretrained, self._simulation_seed, self._n_calls, self._n_seen = 0, 0, 0, 0
        if _init_setup_model:
            self._setup_model()

    # ------------------------------------------------------------------ set-up

    def _setup_model(self) -> None:
        self.set_random_seed(self.seed)  # of what a prior may draw
        self.prior = self.known = Prior.of(self.prior, self.env)
        check_arguments(self)
        self.replay_buffer_class = self.replay_buffer_class or HistoryReplayBuffer
        self._setup_networks_and_buffer()
        self._simulated: HistoryReplayBuffer | None = None
        self.q_net, self.q_net_target = self.policy.q_net, self.policy.q_net_target
        self.operator = operator_of(self)(self.policy, self.n_phi_samples)
        self.acting = EXPLORATIONS[self.exploration]()
        self.exploration_schedule = LinearSchedule(
            self.exploration_initial_eps, self.exploration_final_eps, self.exploration_fraction
        )

    def _start_episodes(self) -> None:
        super()._start_episodes()
        self._memory, self._believed = None, None
        if self.n_pretrain_steps > self._n_pretrained and self._n_updates == 0:
            self.pretrain(self.n_pretrain_steps - self._n_pretrained)

    def _check_learning(self) -> None:
        check_prior(self)  # of the environment in use, which may have been set since

    # ------------------------------------------------------------------ Algorithm 1: act, remember, learn

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Explore. The memory advances on every action, the random ones of the warm-up too."""
        policy, starts = self.policy, np.asarray(self._last_episode_starts)
        if policy.tracker is not None:
            self._believed = policy.tracker.restart(self._believed, self._last_obs, starts)  # type: ignore[arg-type]
        recalled = policy.recall(self._last_obs, self._memory, starts, policy.q_net, self._believed)
        actions = self.acting.values(policy, recalled.encoding, starts).argmax(dim=-1).cpu().numpy()
        is_warm_up = self.num_timesteps < learning_starts
        share = 1.0 if is_warm_up else self.acting.random_share(n_envs, self.exploration_rate)
        actions = sometimes_random(actions, share, policy.q_net.n_actions) + int(policy.action_space.start)
        self._memory = policy.remember(recalled.hidden, actions)
        return actions, actions

    def _see_step(self, action: np.ndarray, new_obs: Any, rewards: np.ndarray, dones: np.ndarray, infos: list[Any]) -> None:
        """Let the user's filters see a step, its end for the next action and both ends for replay."""
        tracker, now = self.policy.tracker, self._believed
        if tracker is not None and now is not None:
            successors = terminal_observations(new_obs, dones, infos)
            self._believed = tracker.advance(now.state, successors, action - int(self.policy.action_space.start), rewards)
            self.replay_buffer.add_beliefs(now.features, self._believed.features)
        self.policy.reward_units.update(th.as_tensor(rewards, device=self.device))
        self._n_seen += self.n_envs

    def _on_step(self) -> None:
        """Update the target network and epsilon, after each step of the environments."""
        self._n_calls += 1
        if self._n_calls % max(self.target_update_interval // self.n_envs, 1) == 0:
            self.follow_target()
            # the statistics of batch normalisation layers are averages already
            latest, target = (get_parameters_by_name(net, ["running_"]) for net in (self.q_net, self.q_net_target))
            polyak_update(latest, target, 1.0)
        self.exploration_rate = self.exploration_schedule(self._current_progress_remaining)
        for name, value in self.acting.logs(self.exploration_rate).items():
            self.logger.record(name, value)

    def train(self, gradient_steps: int, batch_size: int = 16) -> None:
        """N_update times: histories from replay, N_posterior steps on the ELBO and one on the MSBBE."""
        self.policy.set_training_mode(True)
        self._update_learning_rates()
        logs: dict[str, list[float]] = defaultdict(list)
        for _ in range(gradient_steps):
            for name, value in self.update(self.replay(batch_size)).items():
                logs[name].append(value)
            self._n_updates += 1
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, values in logs.items():
            self.logger.record(name, float(np.mean(values)))

    def update(self, histories: HistoryReplaySamples) -> dict[str, float]:
        """N_posterior steps on the ELBO and one on the MSBBE of a batch of histories.

        :param histories: what to learn from
        :return: losses, and both uncertainties in the units of rewards
        """
        batch = self.operator.evaluate(histories, self.rule, self.seen)  # h_t, q_t and b_t
        self.fit_posterior(batch)
        losses = self.operator.losses(batch)
        self.descend(losses.total)
        self.policy.update_bellman_units(batch.b, batch.mask)
        return {name: value.item() for name, value in losses.logs.items()}

    def fit_posterior(self, batch: Batch) -> None:
        """N_posterior steps on the ELBO, the last of which is made together with that on the MSBBE."""
        for _ in range(self.n_posterior_steps - 1):
            self.descend(self.operator.posterior_loss(batch))

    @property
    def rule(self) -> Rule:
        """How Bellman samples are made."""
        return Rule(self.gamma, self.n_steps, self.double_q, self.action_gap, self.action_gap_limit)

    @property
    def seen(self) -> Seen:
        """How many transitions the posterior is conditioned on, as far as they are in the batches."""
        n_simulated = 0 if self._simulated is None else self._simulated.size() * self._simulated.n_envs
        return Seen(max(self._n_seen, self.replay_buffer.size() * self.n_envs), n_simulated)

    def replay(self, batch_size: int) -> HistoryReplaySamples:
        """Histories to learn from, some of them simulated where the prior says so."""
        simulations = self.known.simulations
        n_simulated = 0 if simulations is None else round(simulations.fraction * batch_size)
        if n_simulated == batch_size:
            return self.simulated.sample(batch_size, env=self._vec_normalize_env)
        histories = self._sample_histories(batch_size - n_simulated)
        others = self.simulated.sample(n_simulated, env=self._vec_normalize_env) if n_simulated else None
        return histories if others is None else join_histories(histories, others)

    @property
    def simulated(self) -> HistoryReplayBuffer:
        """The simulated histories of the prior. They are not saved but simulated again, with the same seed, when needed."""
        if self._simulated is None:
            assert self.known.simulations is not None
            self._simulation_seed = self._simulation_seed or int(np.random.randint(1, 2**31))
            kwargs = {"observation_space": self.observation_space, "action_space": self.action_space, "device": self.device}
            self._simulated = simulate(self.known.simulations, kwargs | self.windows, self.policy.tracker, self._simulation_seed)
        return self._simulated

    def refresh_beliefs(self) -> None:
        """Let the user's filters read again what is replayed: to be called when they have changed, as learned ones do."""
        assert self.policy.tracker is not None, "there is no filter in the prior"
        if self._simulated is not None:
            self._simulated.reread(self.policy.tracker)
        believed = self.replay_buffer.reread(self.policy.tracker)
        if self.replay_buffer.n_added == self._n_stored:  # and no buffer was loaded since, which ends with other episodes
            self._believed = believed

    def descend(self, loss: th.Tensor | None) -> None:
        """A gradient step on whatever a loss depends on."""
        if loss is None:
            return
        optimizers = (self.policy.optimizer, self.policy.posterior_optimizer)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        self.policy.average_weights()

    def follow_target(self) -> None:
        """Let the target network follow."""
        polyak_update(self.q_net.parameters(), self.q_net_target.parameters(), self.tau)

    def _update_learning_rates(self) -> None:
        self._update_learning_rate(self.policy.optimizer)
        rate = FLOW_LEARNING_RATE * self.lr_schedule(self._current_progress_remaining)
        self.logger.record("train/posterior_learning_rate", rate)
        update_learning_rate(self.policy.posterior_optimizer, rate)

    # ------------------------------------------------------------------ Algorithm 2: learn before the first action

    def pretrain(self: SelfBEN, n_steps: int, callback: MaybeCallback = None, progress_bar: bool = False) -> SelfBEN:
        """Algorithm 2 of the paper: minimise the MSBBE under the prior before the first action.

        Each step takes what the prior offers: the MSBBE of first observations under the model or the prior over phi (unless
        simulations know better what follows them), of known transitions, and a step of Algorithm 1 on simulated histories.
        Without any of these (``bellman="point"`` and no prior) there is nothing to learn from, which is an error.

        :param n_steps: N_pretrain
        :param callback: called after every step
        :param progress_bar: whether to show a progress bar
        """
        check_count("n_steps", n_steps, 0)
        self._go_on()
        if not hasattr(self, "_logger"):
            self._logger = configure_logger(self.verbose, self.tensorboard_log, "BEN", True)
        stages = pretraining_stages(self, self._last_obs)
        watcher = self._init_callback(callback)
        watcher.on_training_start(locals(), globals())
        self._update_learning_rates()
        for _ in tqdm(range(n_steps), disable=not progress_bar):
            self.policy.set_training_mode(True)  # callbacks that evaluate switch it off
            for name, value in chain.from_iterable(stage().items() for stage in stages):
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
        share = 0.0 if deterministic else self.acting.random_share_of_predict(self.exploration_rate)
        if share > 0:
            start = int(self.policy.action_space.start)
            actions = start + sometimes_random(actions - start, share, self.policy.q_net.n_actions)
            state = self.policy.with_actions(state, actions)
        return actions, state

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

        :param observation: one observation, or a batch of them
        :param state: the state that came with it, as for :meth:`predict`
        :param episode_start: which environments have begun a new episode
        :param n_samples: number of draws, and of hypotheses that the moments are estimated with
        """
        if not self.operator.has_flows:
            raise ValueError(f"A model with bellman={self.bellman!r} has no distribution of b: its flows are switched off")
        check_count("n_samples", n_samples)
        return distribution_of(self.policy, self.policy.recall(observation, state, episode_start), n_samples)

    # ------------------------------------------------------------------ what is saved

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"acting": self.acting.state()}

    def _set_state(self, state: dict[str, Any]) -> None:
        super()._set_state(state)
        self.acting.set_state(state["acting"])

    def _excluded_save_params(self) -> list[str]:
        others = ["acting", "known", "operator", "q_net", "q_net_target", "_simulated"]
        return [*super()._excluded_save_params(), *others]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.optimizer", "policy.posterior_optimizer"], []
