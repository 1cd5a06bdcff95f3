"""The agents that know search and rescue, on the settings of the paper and with more noise.

python -m benchmarks.oracle_search_and_rescue [--episodes 500] [--seed 0] [--settings 5x5/3/5:0.1 7x7/4/8:0.1 ...]
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig, SearchAndRescueVecEnv
from sb3_ben.history.previous_reward import VecPreviousReward
from sb3_ben.oracles.base import Oracle
from sb3_ben.oracles.search_and_rescue import BeliefAgent, KnowsTheMap, NeverOpens, RandomAgent

SETTINGS = ("5x5/3/5:0.1", "7x7/4/8:0.1", "7x7/4/8:0.3", "7x7/4/8:1.0")
AGENTS: dict[str, Callable[[SearchAndRescueConfig, VecEnv, int], Oracle]] = {
    "knows the map": lambda config, venv, seed: KnowsTheMap(venv),
    "belief": lambda config, venv, seed: BeliefAgent(config, seed),
    "never opens": lambda config, venv, seed: NeverOpens(config, seed),
    "random": lambda config, venv, seed: RandomAgent(config, seed),
}
COUNTS = ("victims", "hazards", "listens")


def parse_setting(text: str) -> dict[str, Any]:
    """The keyword arguments that a string like ``7x7/4/8:0.1`` (grid, victims, hazards, noise) stands for."""
    match = re.fullmatch(r"(\d+)x\1/(\d+)/(\d+):([\d.]+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected something like 7x7/4/8:0.1, got {text!r}")
    grid_size, n_victims, n_hazards = (int(number) for number in match.groups()[:3])
    return {"grid_size": grid_size, "n_victims": n_victims, "n_hazards": n_hazards, "sigma_noise": float(match[4])}


def play(agent: Oracle, venv: VecEnv) -> tuple[np.ndarray, dict[str, float]]:
    """One episode in each slot: the returns, and the mean counts of what happened."""
    returns, state, observations = np.zeros(venv.num_envs), None, venv.reset()
    starts = np.ones(venv.num_envs, dtype=bool)
    while True:
        actions, state = agent.predict(observations, state, starts)
        observations, rewards, starts, infos = venv.step(actions)
        returns += rewards
        if starts.all():  # all episodes are equally long
            return returns, {name: float(np.mean([info[name] for info in infos])) for name in COUNTS}


def measure(name: str, setting: str, n_episodes: int, seed: int) -> str:
    """One line of the table."""
    kwargs = parse_setting(setting)
    venv = VecPreviousReward(SearchAndRescueVecEnv(n_episodes, seed=seed, **kwargs))
    agent = AGENTS[name](SearchAndRescueConfig(**kwargs), venv, seed)
    start = time.perf_counter()
    returns, counts = play(agent, venv)
    seconds = time.perf_counter() - start
    error = returns.std(ddof=1) / np.sqrt(n_episodes) if n_episodes > 1 else np.nan
    columns = "".join(f"{counts[column]:>9.2f}" for column in COUNTS)
    return f"{setting:<14}{name:<15}{returns.mean():>9.2f}{error:>8.2f}{columns}{seconds:>9.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=500, help="episodes per agent and setting, played in parallel")
    parser.add_argument("--seed", type=int, default=0, help="seed of the environments and of the agents")
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="grid/victims/hazards:noise")
    parser.add_argument("--agents", nargs="+", default=list(AGENTS), choices=list(AGENTS))
    args = parser.parse_args()
    columns = "".join(f"{column:>9}" for column in (*COUNTS, "seconds"))
    print(f"{'setting':<14}{'agent':<15}{'return':>9}{'s.e.':>8}{columns}")
    for setting in args.settings:
        for name in args.agents:
            print(measure(name, setting, args.episodes, args.seed), flush=True)


if __name__ == "__main__":
    main()
