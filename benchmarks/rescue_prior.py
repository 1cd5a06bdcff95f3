"""What prior knowledge buys in search and rescue: agents that act in worlds they have never seen.

python -m benchmarks.rescue_prior --prior learned --env SearchAndRescue5x5-v0 [--seeds 1] [--steps 300000] [--worlds 500]

- ``none``: tabula rasa, a recurrent agent
- ``history-free``: the same without a memory
- ``weak``: the paper's weak prior, moves and blind doors, in Algorithm 2 before the first step
- ``strong``: histories simulated from the uniform prior, half of them by the agent that acts on the exact posterior
- ``learned``: a belief learned from the rewards of doors opened at random in simulated worlds, as input of an agent without other
  memory, which then learns to act in simulated worlds
- ``belief``: the exact filter in its place

Every episode is a new world drawn from the prior: learning in them is learning from simulations, and the score is zero shot, one
greedy episode in each of many new worlds. ``--update 4`` goes on learning in four times as many new worlds as run side by side,
each time from where training ended, and ``--train-noise`` learns in worlds with another noise than that of the test.
``hazards learning`` are hazards met per 1000 steps of training, in its first tenth and overall.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecMonitor

from benchmarks.harness.metrics import play_updating
from sb3_ben import BEN, evaluate_policy, make_vec
from sb3_ben.common.extractors import RescueExtractor
from sb3_ben.common.priors import Prior, PriorFactory, Simulations
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.oracles.rescue_learned import learned_filter
from sb3_ben.oracles.rescue_prior import RescueTransitions, exact_filter
from sb3_ben.oracles.search_and_rescue import BeliefAgent

TEST_SEED = 1_000_000
PRIORS = ("none", "history-free", "weak", "strong", "learned", "belief")
COUNTS = ("victims", "hazards", "listens")
SETTINGS: dict[str, Any] = {
    "learning_starts": 5000,
    "gamma": 0.95,
    "double_q": True,
    "train_freq": 1,
    "exploration": "spread",
    "tau": 0.05,
    "action_gap": 0.8,  # without it agents stand before doors that they know are empty, having an error of Q for the better
    "action_gap_limit": 3.0,  # hazards are bad enough
}
# a belief says it all
MARKOV: dict[str, Any] = {
    "batch_size": 256,
    "sequence_length": 1,
    "gradient_steps": 5,
    "n_phi_samples": 2,
    "policy_kwargs": {"net_arch": [128]},
}
RECURRENT: dict[str, Any] = {
    "batch_size": 32,
    "sequence_length": 48,
    "gradient_steps": 1,
    "policy_kwargs": {"net_arch": [128], "rnn_hidden_size": 128, "features_extractor_class": RescueExtractor},
}


def make_prior(
    name: str, env_id: str, config: SearchAndRescueConfig, args: argparse.Namespace, seed: int
) -> Prior | PriorFactory | None:
    if name in ("none", "history-free"):
        return None
    if name == "weak":
        return Prior(transitions=RescueTransitions(config, seed=seed))
    if name == "belief":
        return partial(exact_filter, n_points=args.points)
    if name == "learned":
        return partial(learned_filter, n_episodes=args.random_episodes, n_steps=args.belief_steps, n_anchors=args.anchors)
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
    noise = {} if args.train_noise is None else {"sigma_noise": args.train_noise}
    venv = make_vec(args.env, args.envs, seed=seed, horizon=args.train_horizon, **noise)
    shape = MARKOV if args.prior in ("belief", "learned") else RECURRENT
    return BEN(
        "MlpGruPolicy" if args.prior in ("none", "weak", "strong") else "MlpPolicy",
        venv,
        learning_rate=LinearSchedule(args.learning_rate, args.learning_rate / 20, 1.0),
        buffer_size=args.buffer,
        bellman=args.bellman,
        n_pretrain_steps=args.pretrain if args.prior in ("weak", "strong") else 0,
        prior=make_prior(args.prior, args.env, venv.world.config, args, seed),
        target_update_interval=args.envs,
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
    return {"return": float(mean), **{name: float(np.mean([info[name] for info in infos])) for name in COUNTS}}


class Checkpoints(BaseCallback):
    """Prints the score after each eighth of the steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, self.n_done = args, 0

    def _on_step(self) -> bool:
        if self.num_timesteps >= (self.n_done + 1) * self.args.steps / 8 and self.n_done < 7:
            self.n_done += 1
            found = score(self.model, self.args.env, min(self.args.worlds, 100))  # type: ignore[arg-type]
            print(f"  after {self.num_timesteps} steps: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()), flush=True)
        return True


def hazards_while_learning(model: BEN, config: SearchAndRescueConfig) -> str:
    hazards = (model.replay_buffer.rewards[: model.replay_buffer.size()] == config.reward_hazard).mean(axis=1) * 1000
    return f"{hazards[: max(len(hazards) // 10, 1)].mean():.1f} {hazards.mean():.1f}" if len(hazards) else "-"


def run(args: argparse.Namespace, seed: int) -> None:
    start = time.process_time()
    model = make_model(args, seed)
    if args.steps:
        model.learn(args.steps, Checkpoints(args) if args.checkpoints else None)
    elif model.n_pretrain_steps:
        model.pretrain(model.n_pretrain_steps)
    cpu, found = time.process_time() - start, score(model, args.env, args.worlds)
    if args.save:
        model.save(f"{args.save}_{seed}")
    row = f"{args.env:24s}{args.prior:14s}{seed:6d}{args.steps:9d}" + "".join(f"{value:9.3f}" for value in found.values())
    print(f"{row}{cpu:8.0f}   {hazards_while_learning(model, make_vec(args.env, 1).world.config)}", flush=True)
    if args.update:
        worlds = VecMonitor(make_vec(args.env, model.n_envs, seed=TEST_SEED))
        found = {name: float(np.mean(values)) for name, values in play_updating(model, worlds, args.update).items()}
        print(f"{'':24s}{'  updating':14s}{seed:6d}{'':9s}" + "".join(f"{value:9.3f}" for value in found.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prior", choices=PRIORS, default="learned")
    parser.add_argument("--env", default="SearchAndRescue5x5-v0")
    parser.add_argument("--bellman", choices=["flow", "point"], default="flow")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=100, help="tuning used seeds below 100")
    parser.add_argument("--steps", type=int, default=300_000, help="environment steps of training; 0 for pre-training alone")
    parser.add_argument("--pretrain", type=int, default=2000, help="steps of Algorithm 2 (weak and strong)")
    parser.add_argument("--simulated-steps", type=int, default=20_000, help="transitions to simulate (strong)")
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--buffer", type=int, default=200_000)
    parser.add_argument("--train-horizon", type=int, default=0, help="length of training episodes; 0 for the environment's own")
    parser.add_argument("--train-noise", type=float, default=None, help="sigma of the training worlds, if another")
    parser.add_argument("--points", type=int, default=8, help="quadrature points per side of the filter (belief)")
    parser.add_argument("--random-episodes", type=int, default=80_000, help="of 60 random steps each (learned)")
    parser.add_argument("--belief-steps", type=int, default=15_000, help="gradient steps on the belief (learned)")
    parser.add_argument("--anchors", type=int, default=16, help="anchors for each door (learned)")
    parser.add_argument("--learning-rate", type=float, default=7e-4)
    parser.add_argument("--worlds", type=int, default=500)
    parser.add_argument("--update", type=int, default=0, help="rounds of new worlds to go on learning in, scored too")
    parser.add_argument("--checkpoints", action="store_true", help="print scores in the course of training")
    parser.add_argument("--save", default=None, help="where to save the models, without seed and suffix")
    args = parser.parse_args()
    th.set_num_threads(1)
    names = "".join(f"{name:>9s}" for name in ("return", *COUNTS))
    print(f"{'environment':24s}{'prior':14s}{'seed':>6s}{'steps':>9s}{names}{'CPU s':>8s}   hazards learning")
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        run(args, seed)


if __name__ == "__main__":
    main()
