"""What experiments measure beside returns: functions of a trained model that return arrays."""

from __future__ import annotations

import copy
import io
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import FloatSchedule
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.harness.training import Manager, Recorder, new_worlds
from sb3_ben import BEN
from sb3_ben.ben.learning import BELLMAN_NOISE
from sb3_ben.callbacks import episode_statistics, exact_belief, world_of
from sb3_ben.envs.tiger import OPEN_1, TigerConfig

N_CALIBRATION, N_DRAWS = 100, 256
LATENCY_ENVS, LATENCY_CALLS = (1, 64), 20
N_ROUNDS = 4  # of new worlds in which agents go on learning
FINAL_LEARNING_RATE = 0.05  # in them, relative to that at the start of training

Found = dict[str, Any]


# ---------------------------------------------------------------------- speed


def speed(model: BaseAlgorithm, manager: Manager, recorder: Recorder) -> Found:
    """CPU seconds of training, environment steps and gradient steps per second, and the latency of ``predict``."""
    times, n_updates = recorder.times, gradient_steps(model)
    found = {
        "steps_per_second": model.num_timesteps / times["cpu"],
        "updates_per_second": n_updates / times["update"] if times["update"] > 0 else np.nan,
    }
    return found | {f"predict_ms_{n}": 1000 * latency(model, manager, n) for n in LATENCY_ENVS}


def gradient_steps(model: Any) -> int:
    """Gradient steps so far; on-policy algorithms count epochs, each of which takes several."""
    if not isinstance(model, OnPolicyAlgorithm):
        return model._n_updates
    return model._n_updates * math.ceil(model.n_steps * model.n_envs / model.batch_size)  # type: ignore[attr-defined]


def latency(model: BaseAlgorithm, manager: Manager, n_envs: int) -> float:
    """CPU seconds of a call of ``predict`` in the middle of an episode, the best of three series of calls."""
    observation = new_worlds(model, manager, n_envs).reset()
    _, state = model.predict(observation, deterministic=True)  # type: ignore[arg-type]
    goes_on = np.zeros(n_envs, dtype=bool)

    def series() -> float:
        start = time.process_time()
        for _ in range(LATENCY_CALLS):
            model.predict(observation, state, goes_on, True)  # type: ignore[arg-type]
        return (time.process_time() - start) / LATENCY_CALLS

    return min(series() for _ in range(3))


# ---------------------------------------------------------------------- calibration


def calibration(model: BaseAlgorithm, manager: Manager, recorder: Recorder) -> Found:
    """Where realised Bellman samples fall in their predicted distributions, and beliefs beside the exact posterior.

    ``pit`` are the ranks, between 0 and 1, of b + noise among draws of the predicted law, which is that of b with the noise of
    training; uniform if the law is right. b is taken with the agent's own next values. ``belief`` is the agent's
    probability that the tiger is behind door 1 (the share of draws of b(open 1) nearer to the tiger than to the gold), ``exact``
    the posterior of the same history; only on the tiger problem.
    """
    if not isinstance(model, BEN) or not model.operator.has_flows:
        return {}
    venv = new_worlds(model, manager, N_CALIBRATION)
    beliefs = Beliefs(world_of(venv))
    ranks: list[np.ndarray] = []
    observation, state, starts = venv.reset(), None, np.ones(N_CALIBRATION, dtype=bool)
    while True:
        draws = model.bellman_distribution(observation, state, starts, N_DRAWS).samples  # type: ignore[arg-type]
        actions, next_state = model.predict(observation, state, starts, deterministic=True)  # type: ignore[arg-type]
        beliefs.compare(observation, draws, actions)
        next_observation, rewards, dones, _ = venv.step(actions)
        if dones.any():  # the end of all episodes, beyond which no value is to be seen
            break
        b = rewards + model.gamma * next_values(model, next_observation, next_state)
        chosen = draws[np.arange(len(b)), actions - int(model.policy.action_space.start)]
        ranks.append(ranks_of(model, b, chosen))
        observation, state, starts = next_observation, next_state, dones
    return {"pit": np.concatenate(ranks), **beliefs.found()}


class Beliefs:
    """The agent's belief and the exact posterior, step by step, on the tiger problem; nothing on others.

    :param world: the world behind the environment
    """

    def __init__(self, world: Any) -> None:
        self.config = world.config if world is not None and isinstance(world.config, TigerConfig) else None
        self.exact = None if self.config is None else exact_belief(self.config)
        self._pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def compare(self, observation: Any, draws: np.ndarray, actions: np.ndarray) -> None:
        """Take a step: what is observed, what the agent believes of b, what it does."""
        if self.config is None or self.exact is None:
            return
        self.exact.after(observation)
        self._pairs.append((tiger_belief(draws, self.config), self.exact.oracle.beliefs(self.exact._state)))
        self.exact.act(actions)

    def found(self) -> Found:
        names = ("belief", "exact")
        return {
            name: np.round(np.concatenate(part), 3) for name, part in zip(names, zip(*self._pairs, strict=True), strict=False)
        }


def ranks_of(model: BEN, b: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """The ranks of Bellman samples, with the noise of training, among draws ``(n, n_draws)`` of the predicted law."""
    noise = BELLMAN_NOISE * float(model.policy.bellman_units.std) * np.random.standard_normal(len(b))
    return np.round((draws < (b + noise)[:, None]).mean(axis=1), 3)


def next_values(model: BEN, observation: Any, state: Any) -> np.ndarray:
    """The value of the best action after a history, in the units of rewards."""
    encoding = model.policy.recall(observation, state, np.zeros(len(observation), dtype=bool)).encoding
    return model.policy.bellman_units.unstandardize(encoding.q_values.detach()).amax(dim=-1).cpu().numpy()


def tiger_belief(draws: np.ndarray, config: TigerConfig) -> np.ndarray:
    """The agent's probability of the tiger behind door 1: b(open 1) has two modes, as far apart as the rewards."""
    return (draws[:, OPEN_1] < (config.reward_tiger + config.reward_gold) / 2).mean(axis=1)


# ---------------------------------------------------------------------- learning on in new worlds


def updating(model: BaseAlgorithm, manager: Manager, recorder: Recorder) -> Found:
    """What BEN achieves in its first episodes in new worlds if it goes on learning in them."""
    if not isinstance(model, BEN):
        return {}
    found = play_updating(model, manager.evaluation_envs(model.n_envs), N_ROUNDS)
    return {f"updating_{name}": np.array(values) for name, values in found.items()}


def play_updating(model: BEN, worlds: VecEnv, n_rounds: int) -> dict[str, list[float]]:
    """Returns and counts of greedy episodes of agents that go on learning, from where the model is, with what it has replayed.

    A round is one episode in each of the worlds side by side, by one agent; every round starts with the model as it is.
    """
    worlds.observation_space = model.observation_space  # whose bounds depend on the noise that the model was trained with
    file = io.BytesIO()
    model.save(file)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(n_rounds):
        file.seek(0)
        agent = BEN.load(file, env=worlds, exploration="greedy", learning_starts=0)
        agent.replay_buffer = copy.deepcopy(model.replay_buffer)
        agent.lr_schedule = agent.learning_rate = FloatSchedule(FINAL_LEARNING_RATE * model.lr_schedule(1.0))
        agent.learn(10**9, _OneEpisodeEach(found))
    return found


class _OneEpisodeEach(BaseCallback):
    """Collects the first episode of each environment, and ends training after the last of them."""

    def __init__(self, found: dict[str, list[float]]) -> None:
        super().__init__()
        self.found = found

    def _on_training_start(self) -> None:
        self.running = np.ones(self.training_env.num_envs, dtype=bool)

    def _on_step(self) -> bool:
        for i in np.flatnonzero(self.running & self.locals["dones"]):
            info = self.locals["infos"][i]
            self.running[i] = False
            self.found["return"].append(info["episode"]["r"])
            for name, value in episode_statistics(info).items():
                self.found[name].append(value)
        return bool(self.running.any())


METRICS: dict[str, Callable[[BaseAlgorithm, Any, Any], Found]] = {
    "speed": speed,
    "calibration": calibration,
    "updating": updating,
}
