"""What changes of the zoo's hyperparameters do, for any algorithm: on seeds and in worlds that no published number uses.

python -m benchmarks.tuning --algo ppo_lstm --env Tiger-v0 --options "" "ent_coef=0.05" "gae_lambda=1.0" [--seeds 1]
python -m benchmarks.tuning --algo ppo_lstm --env Tiger-v0 --search 24 --jobs 2

The first tries changes for which there is a reason, the second draws them from ``search_spaces.yml``, at every call the same.
Every set of options is trained as by the zoo and scored by its mean greedy return in worlds that training has not seen, the same
for all. Each trial is a line of ``trials.csv`` as soon as it is complete, and is not run again. (For thousands of trials on many
machines there is the zoo's own search, ``python -m rl_zoo3.train -optimize``.)
"""

from __future__ import annotations

import argparse
import csv
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch as th
import yaml
from joblib import Parallel, delayed

from benchmarks.common import tuned_steps
from benchmarks.harness.experiment import (
    N_TUNING_SEEDS,
    TUNING_EVALUATION_SEED,
    Agent,
    Environment,
    Evaluation,
    Experiment,
    Job,
)
from benchmarks.harness.training import Places, output_in, train

SPACES = Path(__file__).with_name("search_spaces.yml")
TRIALS = Path(__file__).with_name("trials.csv")


class Trial(NamedTuple):
    """One run: what was tried.

    :param algo: algorithm, as in the zoo
    :param env: environment
    :param steps: environment steps
    :param seed: seed, below 40
    :param options: arguments in place of the zoo's
    """

    algo: str
    env: str
    steps: int
    seed: int
    options: str

    def job(self, episodes: int) -> Job:
        experiment = Experiment(
            name="tuning",
            number=0,
            title="",
            question="",
            environments={self.env: Environment(self.env)},
            agents={self.options: Agent(self.algo, eval(f"dict({self.options})"))},
            references=(),
            steps=self.steps,
            seeds=1,
            evaluation=Evaluation(episodes, points=0),
            evaluation_seed=TUNING_EVALUATION_SEED,
        )
        return Job(experiment, self.env, self.options, self.seed)


class Score(NamedTuple):
    """What came of it: the mean greedy return after training, and the CPU seconds that training took."""

    mean_return: float
    cpu_seconds: float


def score(trial: Trial, episodes: int) -> tuple[Trial, Score]:
    th.set_num_threads(1)
    job = trial.job(episodes)
    with tempfile.TemporaryDirectory() as folder:
        places = Places(Path(folder), Path(folder), checkpoint_seconds=float("inf"))
        places.of(job).mkdir(parents=True)
        with output_in(Path(folder) / "output.txt"):
            record = train(job, places)
    return trial, Score(float(record.arrays["eval_return"].mean()), record.meta["times"]["cpu"])


def drawn(algo: str, env_id: str, n: int) -> list[str]:
    """The first n sets of options of an algorithm's random search in an environment."""
    generator = random.Random(f"{algo} {env_id}")
    space = yaml.safe_load(SPACES.read_text())[algo]
    options: dict[str, None] = {}  # a set that keeps its order
    while len(options) < n:
        options[", ".join(f"{name}={generator.choice(values)!r}" for name, values in space.items())] = None
    return list(options)


def read_scores(path: Path) -> dict[str, Score]:
    """The scores of all trials so far, by the fingerprint of their whole configuration, the zoo's part of it included."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["digest"]: Score(*(float(row[name]) for name in Score._fields)) for row in csv.DictReader(file)}


def write_score(path: Path, trial: Trial, digest: str, result: Score) -> None:
    """Append a line."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow((*Trial._fields, *Score._fields, "digest"))
        writer.writerow((*trial, f"{result.mean_return:.4f}", f"{result.cpu_seconds:.1f}", digest))


def run(trials: list[Trial], path: Path, episodes: int, n_jobs: int) -> dict[Trial, Score]:
    """Run what has not been run yet, and say how far it has come."""
    digests, known = {trial: trial.job(episodes).digest() for trial in trials}, read_scores(path)
    scores = {trial: known[digest] for trial, digest in digests.items() if digest in known}
    left = [trial for trial in trials if trial not in scores]
    finished = Parallel(n_jobs=n_jobs, return_as="generator_unordered")(delayed(score)(trial, episodes) for trial in left)
    for n, (trial, result) in enumerate(finished, start=1):
        write_score(path, trial, digests[trial], result)
        scores[trial] = result
        print(f"{n} of {len(left)}: {result.mean_return:9.3f}, seed {trial.seed}: {trial.options or 'as they are'}", flush=True)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", required=True, help="as in the zoo")
    parser.add_argument("--env", required=True)
    parser.add_argument("--options", nargs="+", default=[], help="arguments in place of the zoo's, each a row")
    parser.add_argument("--search", type=int, default=0, help="number of random sets of options to try beside them")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=None, help="of each run (default: the zoo's)")
    parser.add_argument("--episodes", type=int, default=1000, help="of each score")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--trials", type=Path, default=TRIALS, help="file of all trials (default: %(default)s)")
    args = parser.parse_args()
    if not 1 <= args.seeds <= N_TUNING_SEEDS:
        parser.error(f"--seeds must be from 1 to {N_TUNING_SEEDS}")
    steps = args.steps or tuned_steps(args.algo, args.env)
    all_options = [*args.options, *(drawn(args.algo, args.env, args.search) if args.search else [])] or [""]
    seeds = range(args.seeds)
    trials = [Trial(args.algo, args.env, steps, seed, options) for options in all_options for seed in seeds]
    scores = run(trials, args.trials, args.episodes, args.jobs)
    rows = {options: [scores[Trial(args.algo, args.env, steps, seed, options)] for seed in seeds] for options in all_options}
    print(f"\n{'algorithm':10s} {'environment':24s}{'mean':>9s}{'CPU s':>8s}   all seeds: options")
    for options, results in sorted(rows.items(), key=lambda row: -np.mean([one.mean_return for one in row[1]])):
        returns, cpu = zip(*results, strict=True)
        row = f"{args.algo:10s} {args.env:24s}{np.mean(returns):9.3f}{np.mean(cpu):8.0f}"
        print(f"{row}   {' '.join(f'{value:.2f}' for value in returns)}: {options or 'as they are'}")


if __name__ == "__main__":
    main()
