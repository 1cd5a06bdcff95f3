"""How well BEN learns, beside its control (the same agent with the flows switched off), with the zoo's hyperparameters.

python -m benchmarks.learning [--env Tiger-v0 ...] [--seeds 10] [--jobs 2] [--options "exploration='spread'" ...]

Every agent is scored by its greedy return after the last step, in worlds that training has not seen; all meet the same ones.
Where the optimum is known, the score is the optimum plus the mean difference to the optimal agent in these very worlds, which is
far less noisy than the mean return. The exact values of the oracles follow. ``learning`` is the mean return of the last 100
episodes of training, exploration included. CPU seconds are those of training and scoring.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from joblib import Parallel, delayed
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecNormalize

from benchmarks.common import tuned, tuned_steps
from sb3_ben import BEN, evaluate_policy, make_vec
from sb3_ben.envs import ENVIRONMENTS
from sb3_ben.envs.bandit import BanditConfig
from sb3_ben.envs.tiger import TigerConfig
from sb3_ben.oracles import bandit, tiger

AGENTS: dict[str, dict[str, Any]] = {"BEN": {}, "control (bellman='point')": {"bellman": "point"}}
TEST_SEED = 50_000  # far from the seeds of training and of tuning
N_EPISODES = {"Tiger-v0": 4096, "BernoulliBandit-v0": 20_000}


class Result(NamedTuple):
    """One training run; ``learning`` is the mean return of its last 100 episodes, exploration included."""

    score: float
    cpu_seconds: float
    steps: int
    learning: float


def make(env_id: str, n_envs: int, seed: int) -> VecEnv:
    """The environments of a run: ours in array operations, others in SB3's way."""
    if env_id in ENVIRONMENTS:
        return VecMonitor(make_vec(env_id, n_envs, seed=seed))
    if env_id not in gym.registry:
        import rl_zoo3.import_envs  # noqa: F401  registers CartPoleNoVel-v1 among others
    return make_vec_env(env_id, n_envs, seed=seed)


def returns_of(agent: Any, env_id: str) -> np.ndarray:
    n_episodes = N_EPISODES.get(env_id, 100)
    worlds = make(env_id, min(n_episodes, 1000) if env_id in ENVIRONMENTS else 10, TEST_SEED)
    normalize = agent.get_vec_normalize_env() if isinstance(agent, BEN) else None
    if normalize is not None:
        worlds = VecNormalize(worlds, training=False, norm_reward=False)
        worlds.obs_rms = normalize.obs_rms
    returns, _ = evaluate_policy(agent, worlds, n_episodes, deterministic=True, return_episode_rewards=True)
    return np.array(returns)


def optimum(env_id: str) -> tuple[float, Any] | None:
    """The exact optimum and an agent that attains it, where they are known."""
    if env_id == "Tiger-v0":
        return tiger.bayes_optimal_values(TigerConfig(), discount=1.0, horizon=TigerConfig().horizon).value, tiger.BayesOptimal()
    if env_id == "BernoulliBandit-v0":
        return bandit.bayes_optimal_value(BanditConfig()), bandit.BayesOptimal()
    return None


def references(env_id: str) -> dict[str, float]:
    """Exact undiscounted values of agents that need not learn, where they are known."""
    known = optimum(env_id)
    values = {} if known is None else {"Bayes-optimal, exact": known[0]}
    if env_id == "Tiger-v0":
        config = TigerConfig()
        values["always listens, exact"] = config.horizon * config.reward_listen
        values["posterior sampling, exact"] = tiger.posterior_sampling_value(config, discount=1.0, horizon=config.horizon)
    if env_id == "BernoulliBandit-v0":
        others = {"Thompson": bandit.Thompson(), "greedy": bandit.Greedy(), "random": bandit.RandomArm()}
        values |= {f"{name}, exact": bandit.policy_value(oracle) for name, oracle in others.items()}
    return values


def score(agent: Any, env_id: str) -> float:
    known = optimum(env_id)
    if known is None:
        return float(returns_of(agent, env_id).mean())
    return float(known[0] + (returns_of(agent, env_id) - returns_of(known[1], env_id)).mean())


def train(env_id: str, seed: int, options: dict[str, Any]) -> Result:
    th.set_num_threads(1)
    settings = tuned("ben", env_id) | options
    steps = tuned_steps("ben", env_id)
    worlds = make(env_id, settings.pop("n_envs"), seed)
    normalize = settings.pop("normalize", None)
    if normalize:
        worlds = VecNormalize(worlds, gamma=settings["gamma"], **normalize)
    model = BEN(env=worlds, seed=seed, **settings)
    start = time.process_time()
    model.learn(steps)
    learning = float(np.mean([episode["r"] for episode in model.ep_info_buffer or ()]))
    return Result(score(model, env_id), time.process_time() - start, model.num_timesteps, learning)


def report(env_id: str, name: str, results: list[Result]) -> None:
    scores = np.array([result.score for result in results])
    half = 1.96 * scores.std(ddof=1) / np.sqrt(len(scores)) if len(scores) > 1 else np.nan
    cpu, learning = (np.mean([getattr(result, name) for result in results]) for name in ("cpu_seconds", "learning"))
    row = f"{env_id:24s}{name:28s}{scores.mean():9.3f} +- {half:6.3f}{scores.min():10.3f}{np.median(scores):10.3f}"
    print(f"{row}{learning:10.2f}{results[0].steps:10,d}{cpu:9.0f}   {' '.join(f'{value:.2f}' for value in scores)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", nargs="+", default=["Tiger-v0", "BernoulliBandit-v0"])
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=100, help="the first of them (tuning used seeds below 100)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--options", nargs="+", default=[], help="compare BEN with these arguments instead of the control")
    args = parser.parse_args()
    agents = {options: eval(f"dict({options})") for options in args.options} or AGENTS
    titles = f"{'mean':>9s} +- {'95 %':>6s}{'worst':>10s}{'median':>10s}{'learning':>10s}{'steps':>10s}{'CPU s':>9s}   all seeds"
    print(f"{'environment':24s}{'agent':28s}{titles}")
    for env_id in args.env:
        for name, options in agents.items():
            seeds = range(args.first_seed, args.first_seed + args.seeds)
            report(env_id, name, Parallel(n_jobs=args.jobs)(delayed(train)(env_id, seed, options) for seed in seeds))
        for name, value in references(env_id).items():
            print(f"{env_id:24s}{name:28s}{value:9.3f}")


if __name__ == "__main__":
    main()
