"""The main job in a few minutes: BEN learns the tiger problem, and is compared with the exact answers.

python -m benchmarks.demo [--steps 100000] [--seed 0] [--output results/demo.png]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor

from benchmarks.common import tuned
from sb3_ben import BEN, evaluate_policy, make_vec
from sb3_ben.envs.tiger import LISTEN, TigerConfig
from sb3_ben.history.previous_reward import attach_reward
from sb3_ben.oracles import tiger

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ENV_ID = "Tiger-v0"
ACTIONS = ("open 1", "open 2", "listen")


class LearningCurve(BaseCallback):
    """Greedy returns in the course of training."""

    def __init__(self, every: int, seed: int) -> None:
        super().__init__()
        self.every, self.seed = every, seed
        self.curve: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.every * (len(self.curve) + 1):
            self.curve.append((self.num_timesteps, float(np.mean(returns_of(self.model, self.seed, 256)))))
        return True


def returns_of(agent: Any, seed: int, n_episodes: int) -> np.ndarray:
    """Returns of episodes in worlds that training has not seen; every agent meets the same ones."""
    worlds = make_vec(ENV_ID, 128, seed=seed)
    returns, _ = evaluate_policy(agent, worlds, n_episodes, deterministic=True, return_episode_rewards=True, warn=False)
    return np.array(returns)


def train(steps: int, seed: int) -> tuple[BEN, LearningCurve, float]:
    settings = tuned("ben", ENV_ID)
    n_envs = settings.pop("n_envs")
    model = BEN(env=VecMonitor(make_vec(ENV_ID, n_envs, seed=seed)), seed=seed, **settings)
    curve = LearningCurve(max(steps // 20, 1), seed + 10_000)
    start = time.perf_counter()
    model.learn(steps, callback=curve, progress_bar=True)
    return model, curve, time.perf_counter() - start


def beliefs_while_listening(model: BEN, n_listens: int = 4) -> list[Any]:
    """What the agent believes of b in an episode in which it hears the tiger behind door 1 again and again."""
    state, beliefs = None, []
    for n in range(n_listens + 1):
        observation = attach_reward(np.array([min(n, 1)]), np.array([-float(n > 0)], dtype=np.float32))
        beliefs.append(model.bellman_distribution(observation, state))  # type: ignore[arg-type]
        _, state = model.predict(observation, state, deterministic=True)  # type: ignore[arg-type]
        assert state is not None
        state = (*state[:-1], np.array([LISTEN]))  # whatever it would have done
    return beliefs


def draw(curve: LearningCurve, beliefs: list[Any], path: Path) -> None:
    config = TigerConfig()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    optimum = tiger.bayes_optimal_values(config, 1.0, config.horizon).value
    left.axhline(optimum, color="black", linestyle="--", label="Bayes-optimal (exact)")
    left.axhline(config.horizon * config.reward_listen, color="grey", linestyle=":", label="always listen")
    left.plot(*zip(*curve.curve, strict=True), color="tab:purple", marker="o", markersize=3, label="BEN")
    left.set(xlabel="environment steps", ylabel="greedy return of 11 steps", title="BEN learns the tiger problem")
    left.title.set_fontsize(11)
    left.legend(loc="lower right")
    nets = np.arange(len(beliefs))
    exact = tiger.action_values(config, tiger.belief_after(config, nets))
    for action, colour in enumerate(("tab:red", "tab:green", "tab:blue")):
        mean = np.array([belief.mean[0, action] for belief in beliefs])
        spread = np.array([belief.epistemic_std[0, action] for belief in beliefs])
        right.fill_between(nets, mean - 2 * spread, mean + 2 * spread, color=colour, alpha=0.2, linewidth=0)
        right.plot(nets, mean, color=colour, marker="o", label=f"{ACTIONS[action]}, BEN")
        right.plot(nets, exact[:, action], color=colour, linestyle="--", label=f"{ACTIONS[action]}, exact")
    right.set(xlabel="times the tiger was heard behind door 1", ylabel="value of b", ylim=(-460, 130), xticks=nets)
    right.set_title("What it believes, with two epistemic standard deviations", fontsize=11)
    right.legend(fontsize=8, loc="center right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000, help="environment steps of training")
    parser.add_argument("--episodes", type=int, default=2000, help="episodes of the final evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("results/demo.png"), help="where the picture goes")
    args = parser.parse_args()
    print(f"BEN learns {ENV_ID} for {args.steps:,} steps ...")
    model, curve, seconds = train(args.steps, args.seed)
    agents = {
        f"BEN, {args.steps:,} steps, {seconds:.0f} s": model,
        "always listen": tiger.AlwaysListen(),
        "posterior sampling": tiger.PosteriorSampling(seed=args.seed),
        "Bayes-optimal, played": tiger.BayesOptimal(),
    }
    print(f"\n{'agent':34s}{'mean return':>12s}{'s.e.':>8s}   ({args.episodes} episodes of 11 steps)")
    for name, agent in agents.items():
        returns = returns_of(agent, args.seed + 20_000, args.episodes)
        print(f"{name:34s}{returns.mean():12.2f}{returns.std() / np.sqrt(len(returns)):8.2f}")
    optimum = tiger.bayes_optimal_values(TigerConfig(), discount=1.0, horizon=11).value
    print(f"{'Bayes-optimal, exact':34s}{optimum:12.2f}{0:8.2f}")
    draw(curve, beliefs_while_listening(model), args.output)
    print(f"\nThe picture is {args.output.resolve()}")


if __name__ == "__main__":
    main()
