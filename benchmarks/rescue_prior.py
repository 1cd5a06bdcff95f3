"""What prior knowledge buys in search and rescue.

python -m benchmarks.rescue_prior --prior belief --env SearchAndRescue5x5-v0 [--seeds 1] [--steps 500000] [--worlds 500]

- ``none``: tabula rasa, a recurrent agent
- ``weak``: the paper's weak prior, moves and blind doors, in Algorithm 2 before the first step
- ``strong``: histories simulated from the uniform prior, half of them by the agent that acts on the exact posterior
- ``belief``: the exact filter as belief of an agent without other memory

Agents are scored greedily, one episode in each of many new worlds. ``hazards learning`` are hazards met per 1000 steps of
training, in its first tenth and overall.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.utils import LinearSchedule

from sb3_ben import BEN, evaluate_policy, make_vec
from sb3_ben.common.priors import Prior, Simulations
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.oracles.rescue_prior import RescueBelief, RescueTransitions
from sb3_ben.oracles.search_and_rescue import BeliefAgent

TEST_SEED = 1_000_000
SETTINGS: dict[str, Any] = {
    "learning_starts": 2000,
    "tau": 0.05,
    "gamma": 0.95,
    "double_q": True,
    "train_freq": 1,
    "gradient_steps": 1,
    "target_update_interval": 64,
    "exploration": "spread",
}
# the belief says it all
MARKOV: dict[str, Any] = {
    "batch_size": 128,
    "sequence_length": 4,
    "policy_kwargs": {"net_arch": [256, 256]},
}
RECURRENT: dict[str, Any] = {
    "batch_size": 32,
    "sequence_length": 48,
    "policy_kwargs": {"net_arch": [128], "rnn_hidden_size": 128},
}


def make_prior(name: str, env_id: str, config: SearchAndRescueConfig, args: argparse.Namespace) -> Prior | None:
    if name == "none":
        return None
    if name == "weak":
        return Prior(transitions=RescueTransitions(config, seed=0))
    if name == "belief":
        return Prior(belief=RescueBelief(config, args.points))
    worlds = Simulations(
        lambda: make_vec(env_id, args.envs, horizon=args.train_horizon),
        BeliefAgent(config),
        n_steps=args.simulated_steps,
        demonstrations=0.5,
        epsilon=0.1,
        fraction=0.25,
    )
    return Prior(simulations=worlds)


def make_model(args: argparse.Namespace, seed: int) -> BEN:
    venv = make_vec(args.env, args.envs, seed=seed, horizon=args.train_horizon)
    config = venv.world.config
    shape = MARKOV if args.prior == "belief" else RECURRENT
    return BEN(
        "MlpPolicy" if args.prior == "belief" else "MlpGruPolicy",
        venv,
        learning_rate=LinearSchedule(args.learning_rate, args.learning_rate / 10, 1.0),
        buffer_size=args.buffer,
        bellman=args.bellman,
        n_pretrain_steps=args.pretrain if args.prior in ("weak", "strong") else 0,
        prior=make_prior(args.prior, args.env, config, args),
        seed=seed,
        **SETTINGS,
        **shape,
    )


def score(model: BEN, env_id: str, n_worlds: int) -> dict[str, float]:
    """Mean return, victims, hazards and listens of greedy episodes in new worlds."""
    infos: list[dict[str, Any]] = []

    def keep(local: dict[str, Any], _: dict[str, Any]) -> None:
        if local["done"]:
            infos.append(local["info"])

    worlds = make_vec(env_id, min(n_worlds, 100), seed=TEST_SEED)
    mean, _ = evaluate_policy(model, worlds, n_worlds, deterministic=True, warn=False, callback=keep)
    counts = {name: float(np.mean([info[name] for info in infos])) for name in ("victims", "hazards", "listens")}
    return {"return": float(mean), **counts}


def hazards_while_learning(model: BEN, config: SearchAndRescueConfig) -> str:
    hazards = (model.replay_buffer.rewards[: model.replay_buffer.size()] == config.reward_hazard).mean(axis=1) * 1000
    return f"{hazards[: max(len(hazards) // 10, 1)].mean():.1f} {hazards.mean():.1f}" if len(hazards) else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prior", choices=["none", "weak", "strong", "belief"], default="belief")
    parser.add_argument("--env", default="SearchAndRescue5x5-v0")
    parser.add_argument("--bellman", choices=["flow", "point"], default="point")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=100, help="tuning used seeds below 100")
    parser.add_argument("--steps", type=int, default=500_000, help="environment steps of training; 0 for zero shot")
    parser.add_argument("--pretrain", type=int, default=2000, help="steps of Algorithm 2 (weak and strong)")
    parser.add_argument("--simulated-steps", type=int, default=20_000, help="transitions to simulate (strong)")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--buffer", type=int, default=200_000)
    parser.add_argument("--train-horizon", type=int, default=0, help="length of training episodes; 0 for the environment's own")
    parser.add_argument("--points", type=int, default=None, help="quadrature points per side of the filter (belief)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--worlds", type=int, default=500)
    parser.add_argument("--save", default=None, help="where to save the models, without seed and suffix")
    args = parser.parse_args()
    th.set_num_threads(1)
    names = f"{'return':>9s}{'victims':>9s}{'hazards':>9s}{'listens':>9s}{'CPU s':>8s}   hazards learning"
    print(f"{'environment':24s}{'prior':8s}{'steps':>9s}{names}")
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        start = time.process_time()
        model = make_model(args, seed)
        if args.steps:
            model.learn(args.steps)
        elif model.n_pretrain_steps:
            model.pretrain(model.n_pretrain_steps)
        cpu, found = time.process_time() - start, score(model, args.env, args.worlds)
        row = f"{args.env:24s}{args.prior:8s}{args.steps:9d}{found['return']:9.2f}{found['victims']:9.2f}{found['hazards']:9.3f}"
        config = make_vec(args.env, 1).world.config
        print(f"{row}{found['listens']:9.1f}{cpu:8.0f}   {hazards_while_learning(model, config)}", flush=True)
        if args.save:
            model.save(f"{args.save}_{seed}")


if __name__ == "__main__":
    main()
