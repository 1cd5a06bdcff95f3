"""What changes of the zoo's hyperparameters do, for any algorithm: on seeds below 100, which no published number uses.

python -m benchmarks.tuning --algo ppo_lstm --env Tiger-v0 --options "" "ent_coef=0.05" "gae_lambda=1.0" [--seeds 1]

Every set of options is trained as by the zoo and scored by its mean greedy return in worlds that training has not seen, the same
for all. The zoo's own search (``python -m rl_zoo3.train -optimize``) is for many trials; this is for a few with a reason.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch as th
from joblib import Parallel, delayed

from benchmarks.common import tuned_steps
from benchmarks.harness.experiment import Agent, Environment, Evaluation, Experiment, Job
from benchmarks.harness.training import Places, output_in, train


def experiment(algo: str, env_id: str, all_options: list[str], steps: int, episodes: int) -> Experiment:
    return Experiment(
        name="tuning",
        number=0,
        title="",
        question="",
        environments={env_id: Environment(env_id)},
        agents={options: Agent(algo, eval(f"dict({options})")) for options in all_options},
        references=(),
        steps=steps,
        seeds=1,
        evaluation=Evaluation(episodes, points=0),
    )


def score(job: Job) -> tuple[float, float]:
    """The mean greedy return after training, and the CPU seconds that training took."""
    th.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        places = Places(Path(folder), Path(folder), checkpoint_seconds=float("inf"))
        places.of(job).mkdir(parents=True)
        with output_in(Path(folder) / "output.txt"):
            record = train(job, places)
    return float(record.arrays["eval_return"].mean()), record.meta["times"]["cpu"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", required=True, help="as in the zoo")
    parser.add_argument("--env", required=True)
    parser.add_argument("--options", nargs="+", default=[""], help="arguments in place of the zoo's, each a row")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=None, help="of each run (default: the zoo's)")
    parser.add_argument("--episodes", type=int, default=1000, help="of each score")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    args = parser.parse_args()
    steps = args.steps or tuned_steps(args.algo, args.env)
    tried = experiment(args.algo, args.env, args.options, steps, args.episodes)
    print(f"{'algorithm':10s} {'environment':24s}{'mean':>9s}{'CPU s':>8s}   all seeds: options")
    for options in args.options:
        jobs = [Job(tried, args.env, options, seed) for seed in range(args.seeds)]
        scores, cpu = zip(*Parallel(n_jobs=args.jobs)(delayed(score)(job) for job in jobs), strict=True)
        row = f"{args.algo:10s} {args.env:24s}{np.mean(scores):9.3f}{np.mean(cpu):8.0f}"
        print(f"{row}   {' '.join(f'{value:.2f}' for value in scores)}: {options or 'as they are'}", flush=True)


if __name__ == "__main__":
    main()
