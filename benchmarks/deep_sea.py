"""Deep sea: how many episodes until the treasure is found regularly, by BootDQN+prior, by SB3's DQN, and by chance (2^N).

python -m benchmarks.deep_sea [--sizes 10 20] [--seeds 5] [--jobs 1] [--budget 2000]

A run counts as solved in the first episode at which the treasure was found in a tenth of all episodes so far (an average regret
of 0.9) and at least ten times; it stops there, or when its budget of episodes is spent. Each seed has an action mapping of its
own. BootDQN has the hyperparameters of hyperparams/bootdqn.yml; DQN has those that both share (network, learning rate, batch,
replay, target updates) and SB3's epsilon-greedy exploration, annealed from 1 to 0.05 over the first tenth of the budget.
"""

from __future__ import annotations

import argparse
import inspect
import time
from typing import Any, NamedTuple

import numpy as np
import torch as th
from joblib import Parallel, delayed
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

from benchmarks.common import tuned
from sb3_ben import BootDQN, make_vec

MIN_SHARE, MIN_FINDS = 0.1, 10


class Result(NamedTuple):
    """One training run.

    :param first: episode of the first find, ``None`` if there was none
    :param solved: episode in which the criterion was met, ``None`` if it was not
    :param greedy: whether the greedy policy finds the treasure in the end
    :param episodes: number of episodes of the run
    :param cpu_seconds: CPU time
    """

    first: int | None
    solved: int | None
    greedy: bool
    episodes: int
    cpu_seconds: float


class Finds(BaseCallback):
    """Remember in which episodes the treasure was found; stop when the criterion is met or the budget spent.

    :param budget: maximal number of episodes
    """

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget
        self.found: list[bool] = []

    def _on_step(self) -> bool:
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            if done:
                self.found.append(bool(info["is_success"]))
        return not self.solved and len(self.found) < self.budget

    @property
    def solved(self) -> bool:
        n_finds = sum(self.found)
        return n_finds >= max(MIN_FINDS, MIN_SHARE * len(self.found))

    @property
    def first(self) -> int | None:
        return self.found.index(True) + 1 if any(self.found) else None


def settings_of(algorithm: type[BootDQN] | type[DQN]) -> dict[str, Any]:
    """The tuned hyperparameters of BootDQN; for DQN, those that it has too."""
    settings = tuned("bootdqn", "DeepSea-v0")
    settings.pop("n_envs")
    if algorithm is BootDQN:
        return settings
    known = inspect.signature(algorithm.__init__).parameters
    return {name: value for name, value in settings.items() if name in known and not name.startswith("exploration")}


def run(algorithm: type[BootDQN] | type[DQN], size: int, seed: int, budget: int) -> Result:
    th.set_num_threads(1)
    start = time.process_time()
    world = {"size": size, "mapping_seed": seed}
    model = algorithm(env=make_vec("DeepSea-v0", seed=seed, **world), seed=seed, **settings_of(algorithm))
    finds = Finds(budget)
    model.learn(budget * size, callback=finds)
    greedy = finds_greedily(model, world)
    episodes = len(finds.found)
    return Result(finds.first, episodes if finds.solved else None, greedy, episodes, time.process_time() - start)


def finds_greedily(model: DQN, world: dict[str, int]) -> bool:
    """Whether the deterministic policy dives to the treasure; the problem is deterministic, so one episode tells."""
    venv: Any = make_vec("DeepSea-v0", **world)
    obs = venv.reset()
    for _ in range(world["size"]):
        obs, _, _, infos = venv.step(model.predict(obs, deterministic=True)[0])
    return bool(infos[0]["is_success"])


def report(name: str, size: int, results: list[Result], budget: int) -> None:
    solved = [result.solved for result in results if result.solved is not None]
    typical = f"{np.mean(solved):.0f}" if len(solved) == len(results) else f">{budget}"
    every = " ".join(str(result.solved or f">{result.episodes}") for result in results)
    firsts = " ".join(str(result.first or "never") for result in results)
    greedy = sum(result.greedy for result in results)
    row = f"{size:>4d}  {name:16s}{len(solved):>4d}/{len(results):<4d}{typical:>8s}{2**size:>10,d}{greedy:>5d}/{len(results):<4d}"
    print(f"{row}{np.mean([result.cpu_seconds for result in results]):7.0f}   {every}   first finds: {firsts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 20], help="N")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=100, help="the first of them (tuning used seeds below 100)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--budget", type=int, default=2000, help="maximal number of episodes of a run")
    args = parser.parse_args()
    titles = f"{'N':>4s}  {'agent':16s}{'solved':>8s}{'mean':>9s}{'2^N':>10s}{'greedy':>9s}{'CPU s':>8s}"
    print(f"{titles}   episodes until solved, by seed")
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    for size in args.sizes:
        for name, algorithm in {"BootDQN+prior": BootDQN, "DQN": DQN}.items():
            results = Parallel(n_jobs=args.jobs)(delayed(run)(algorithm, size, seed, args.budget) for seed in seeds)
            report(name, size, results, args.budget)


if __name__ == "__main__":
    main()
