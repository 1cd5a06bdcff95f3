"""How fast BEN is, as ratios from one run on one core.

python -m benchmarks.speed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecMonitor

from benchmarks.common import tuned
from sb3_ben import BEN, VecPreviousReward, make_vec
from sb3_ben.ben.learning import FlowOperator, bellman_samples
from sb3_ben.history.samples import HistoryReplaySamples

ENV_ID = "Tiger-v0"


def seconds(function: Callable[[], Any]) -> float:
    """CPU seconds of a call: the machine may be shared."""
    start = time.process_time()
    function()
    return time.process_time() - start


def steps_per_second(model: BaseAlgorithm, steps: int) -> float:
    return steps / seconds(lambda: model.learn(steps))


def learning_speed() -> None:
    """Environment steps per second while learning the tiger problem, at the same hidden size and number of environments."""
    settings = tuned("ben", ENV_ID)
    n_envs = settings.pop("n_envs")
    size = settings.get("policy_kwargs", {}).get("rnn_hidden_size", 64)
    steps, speeds = 128 * n_envs, {}
    kwargs = {"lstm_hidden_size": size, "net_arch": [64]}
    ppo = RecurrentPPO(
        "MlpLstmPolicy", VecMonitor(make_vec(ENV_ID, n_envs, seed=0)), n_steps=128, policy_kwargs=kwargs, device="cpu"
    )
    speeds["RecurrentPPO (its defaults)"] = steps_per_second(ppo, steps)
    for name, options in (("BEN", {}), ("control (bellman='point')", {"bellman": "point"})):
        venv = VecMonitor(make_vec(ENV_ID, n_envs, seed=0))
        model = BEN(env=venv, device="cpu", **{**settings, **options, "learning_starts": 0})
        speeds[name] = steps_per_second(model, 2 * steps)
    base = speeds["RecurrentPPO (its defaults)"]
    print(f"\nEnvironment steps/s, {ENV_ID}, {n_envs} environments, hidden size {size}")
    for name, speed in speeds.items():
        print(f"  {name:32s}{speed:10,.0f}{speed / base:8.1f} x")


def default_speed() -> None:
    """Environment steps per second with default arguments: SB3 wants at least 100."""
    model = BEN("MlpLstmPolicy", "CartPole-v1", learning_starts=0, device="cpu")
    print(f"\nDefault arguments, CartPole-v1, one environment: {steps_per_second(model, 2000):,.0f} steps/s")


def predict_seconds(model: BaseAlgorithm, observation: Any, n_calls: int) -> float:
    """CPU seconds of a call of predict in the middle of an episode."""
    _, state = model.predict(observation, deterministic=True)
    goes_on = np.zeros(len(observation), dtype=bool)
    calls = range(n_calls)
    return min(seconds(lambda: [model.predict(observation, state, goes_on, True) for _ in calls]) for _ in range(3)) / n_calls


def predict_latency(n_calls: int = 500) -> None:
    print("\nMilliseconds per call of predict")
    for n_envs in (1, 64):
        venv = VecPreviousReward(make_vec("SearchAndRescue-v0", n_envs, seed=0))
        kwargs = {"lstm_hidden_size": 64, "net_arch": [64]}
        ppo = RecurrentPPO("MlpLstmPolicy", venv, policy_kwargs=kwargs, device="cpu")
        ben = BEN("MlpLstmPolicy", venv, target_update_interval=n_envs, device="cpu")
        theirs, ours = (1000 * predict_seconds(model, venv.reset(), n_calls) for model in (ppo, ben))
        print(f"  {n_envs:3d} environments: RecurrentPPO {theirs:.3f}, BEN {ours:.3f}, ratio {ours / theirs:.2f}")


def update_time(**kwargs: Any) -> float:
    """Milliseconds of an update on search and rescue."""
    venv = make_vec("SearchAndRescue-v0", 16, seed=0)
    model = BEN("MlpLstmPolicy", venv, learning_starts=10**9, device="cpu", **kwargs)
    model.learn(16 * 256)
    model.train(2, model.batch_size)
    return 1000 * min(seconds(lambda: model.train(5, model.batch_size)) for _ in range(3)) / 5


def update_growth() -> None:
    print("\nMilliseconds per update (search and rescue, 7x7), and what the flows add")
    for batch_size, length in ((16, 32), (32, 32), (64, 32), (32, 64), (32, 128)):
        times = [update_time(batch_size=batch_size, sequence_length=length, bellman=bellman) for bellman in ("flow", "point")]
        print(f"  batch {batch_size:3d}, length {length:3d}: BEN {times[0]:7.1f}, control {times[1]:7.1f}")


def best_ms(function: Callable[[], Any], n_calls: int = 20) -> float:
    """CPU milliseconds of a call, the best of three series."""
    function()
    return 1000 * min(seconds(lambda: [function() for _ in range(n_calls)]) for _ in range(3)) / n_calls


def update_parts(batch_size: int = 32, sequence_length: int = 32) -> None:
    """Where the time of an update goes, and how far it is from the passes through bare torch layers that it cannot do without."""
    venv = make_vec("SearchAndRescue-v0", 16, seed=0)
    model = BEN(
        "MlpLstmPolicy", venv, batch_size=batch_size, sequence_length=sequence_length, learning_starts=10**9, device="cpu"
    )
    model.learn(16 * 256)
    model.train(2, batch_size)
    policy, histories, operator = model.policy, model.replay(batch_size), model.operator
    assert isinstance(operator, FlowOperator)
    encoding = policy.encode(histories.observed).encoding
    batch = operator.evaluate(histories, model.rule, model.seen)
    estimate = operator.estimate(batch)
    parts = {
        "replay": best_ms(lambda: model.replay(batch_size)),
        "recurrent pass": best_ms(lambda: policy.encode(histories.observed)),
        "target pass, Bellman samples": best_ms(lambda: bellman_samples(policy, histories, encoding, model.rule)),
        "flows: density and moments": best_ms(lambda: operator.estimate(batch)),
        "MSBBE": best_ms(lambda: operator.msbbe(batch, estimate)),
    }
    whole, bare = best_ms(lambda: model.train(1, batch_size)), best_ms(lambda: bare_passes(model, histories))
    parts["gradients, optimisers, logs"] = whole - sum(parts.values())
    print(f"\nMilliseconds of an update, batch {batch_size}, length {sequence_length}: {whole:.1f}, of which")
    for name, time_ in parts.items():
        print(f"  {name:36s}{time_:7.1f}{time_ / whole:7.0%}")
    print(f"  bare torch layers, there and back: {bare:.1f}; the update takes {whole / bare:.1f} times as long")


def bare_passes(model: BEN, histories: HistoryReplaySamples) -> None:
    """The layers of both Q-networks and of the flow's conditioner on inputs of the right shapes, with gradients where needed."""
    policy = model.policy
    n_steps, batch_size = histories.mask.shape
    inputs = th.zeros(n_steps + 1, batch_size, policy.q_net.n_inputs)
    latent, q_values, _ = policy.q_net.evaluate(inputs)
    with th.no_grad():
        policy.q_net_target.evaluate(inputs)
    contexts = th.nn.functional.pad(latent, (0, policy.aleatoric.context_dim - latent.shape[-1]))
    (q_values.sum() + policy.aleatoric.shape(contexts).sum()).backward()  # type: ignore[operator]


def main() -> None:
    th.set_num_threads(1)
    learning_speed()
    default_speed()
    predict_latency()
    update_growth()
    update_parts()


if __name__ == "__main__":
    main()
