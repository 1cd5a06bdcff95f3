"""What a learned belief about search and rescue knows, beside the exact filter: doors opened at random in unseen episodes.

python -m benchmarks.learned_belief [--settings 5x5/3/5:0.1 5x5/3/5:1.0 ...] [--seed 0] [--episodes 600]

For each of them: the mean negative log-likelihood of what was found, the share of doors that promise more than 1 (the price of a
listen), what these promise on average, and what they paid.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from stable_baselines3.common.utils import set_random_seed

from benchmarks.oracle_search_and_rescue import parse_setting
from sb3_ben.envs.search_and_rescue import SearchAndRescueConfig
from sb3_ben.oracles.rescue_filter import FilterState, RescueFilter
from sb3_ben.oracles.rescue_learned import LearnedRescueBelief, Openings, learned_belief, random_openings

SETTINGS = ("5x5/3/5:0.1", "5x5/3/5:0.3", "5x5/3/5:1.0")
PROFITABLE = 1.0
UNSEEN = 10**6  # added to the seed, for episodes that the belief is scored on


class Quality(NamedTuple):
    """How good probabilities are, by the doors that were opened."""

    likelihood: float
    profitable: float
    promised: float
    paid: float

    def __str__(self) -> str:
        return f"{self.likelihood:>12.3f}{100 * self.profitable:>12.1f} %{self.promised:>12.2f}{self.paid:>12.2f}"


def quality(probabilities: np.ndarray, found: np.ndarray, config: SearchAndRescueConfig) -> Quality:
    """The quality of probabilities ``(n, 3)`` of nothing, a victim and a hazard, by what was found behind the doors, ``(n,)``."""
    rewards = np.array([0.0, config.reward_victim, config.reward_hazard])
    promised, paid = probabilities @ rewards, rewards[found]
    likelihoods = np.maximum(probabilities[np.arange(len(found)), found], np.finfo(float).tiny)
    profitable = promised > PROFITABLE
    means = [float(values[profitable].mean()) if profitable.any() else np.nan for values in (promised, paid)]
    return Quality(float(-np.log(likelihoods).mean()), float(profitable.mean()), *means)


def exact(data: Openings, config: SearchAndRescueConfig) -> np.ndarray:
    """The filter's probabilities of what is behind the doors that are opened."""
    position = np.zeros((len(data.found), 2))  # which tells nothing about doors
    state = FilterState(position, *(part.astype(float) for part in (data.heard, data.doors, data.gone)))
    return RescueFilter(config).posterior(state).doors[np.arange(len(data.found)), data.opened]


def learned(belief: LearnedRescueBelief, data: Openings) -> np.ndarray:
    """The learned belief's probabilities of what is behind the doors that are opened."""
    logs = belief._evaluate(data.heard, data.doors, data.gone).detach().numpy().astype(float)
    return np.exp(logs[np.arange(len(data.found)), data.opened])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=SETTINGS, help="grid/victims/hazards:noise")
    parser.add_argument("--seed", type=int, default=0, help="of the simulated worlds and of the network")
    parser.add_argument("--episodes", type=int, default=600, help="unseen ones")
    parser.add_argument("--learn-episodes", type=int, default=80_000, help="simulated ones that the belief is learned from")
    parser.add_argument("--learn-steps", type=int, default=15_000, help="gradient steps on them")
    args = parser.parse_args()
    print(f"{'setting':<14}{'doors by':<14}{'-log lik.':>12}{'promise > 1':>14}{'promised':>12}{'paid':>12}")
    for setting in args.settings:
        config = SearchAndRescueConfig(**parse_setting(setting))
        set_random_seed(args.seed)
        belief = learned_belief(config, args.learn_episodes, args.learn_steps, progress_bar=None)
        data = random_openings(config, args.episodes, seed=args.seed + UNSEEN)
        base_rate = np.bincount(data.found, minlength=3) / len(data.found)
        rows = {
            "nothing heard": np.broadcast_to(base_rate, (len(data.found), 3)),
            "learned": learned(belief, data),
            "exact": exact(data, config),
        }
        for name, probabilities in rows.items():
            print(f"{setting:<14}{name:<14}{quality(probabilities, data.found, config)}", flush=True)


if __name__ == "__main__":
    main()
