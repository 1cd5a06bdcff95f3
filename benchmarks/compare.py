"""BEN, RecurrentPPO and BootDQN+prior side by side in TensorBoard: trained by rl-zoo3 on one environment, with several seeds.

python -m benchmarks.compare [--env Tiger-v0] [--seeds 3] [--steps 100000] [--algos ben ppo_lstm bootdqn] [--jobs 2] [--no-serve]

All runs share tags, step axis and evaluation, and the best known agent is a horizontal line in every chart. What is complete is
not trained again, unless its settings or hyperparameters have changed; Ctrl-C stops everything, and the next call goes on from
there.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from rich.progress import Progress

from sb3_ben.callbacks import custom_scalars_layout, oracle_statistics, world_of

ALGOS = ("ben", "ppo_lstm", "bootdqn")
CALLBACKS = "sb3_ben.callbacks"
LOG_EVERY = "stable_baselines3.common.callbacks.LogEveryNTimesteps"
N_LOGS, N_EVALUATIONS, N_PICTURES = 100, 20, 5  # in the course of a run
N_EVAL_ENVS = 10
STEPS = re.compile(r"total_timesteps\s*\|\s*(\d+)")  # in the tables that SB3 prints
TAIL = 15  # lines of a failed run that are shown


@dataclass(frozen=True)
class Run:
    """One training run and its place on the disk.

    :param algo: name of the algorithm in the zoo
    :param env_id: environment id
    :param seed: seed of the run
    :param steps: number of environment steps
    :param eval_episodes: number of episodes in each evaluation
    :param overrides: hyperparameters in place of the tuned ones, as ``name:value``
    :param folder: of the comparison
    """

    algo: str
    env_id: str
    seed: int
    steps: int
    eval_episodes: int
    overrides: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.algo}-{self.seed}"

    @property
    def work(self) -> Path:
        """Where the zoo keeps the model and all else."""
        return self.folder / "runs" / self.name

    @property
    def events(self) -> Path:
        """Where TensorBoard finds the run once it is complete."""
        return self.folder / "tensorboard" / self.name

    def settings(self) -> dict[str, Any]:
        """All that decides what the run will be: it need not be repeated as long as they stay the same."""
        plan = {"steps": self.steps, "eval_episodes": self.eval_episodes, "overrides": list(self.overrides)}
        return {**plan, "hyperparams": hyperparams(self.algo, self.env_id)}

    def is_complete(self) -> bool:
        """Whether the run has been trained to its end with these settings."""
        record = self.work / "settings.json"
        return self.events.is_dir() and record.is_file() and json.loads(record.read_text()) == self.settings()

    def callbacks(self) -> list[Any]:
        """What is logged beside what the zoo logs by itself; at the same steps for all algorithms."""
        own = hyperparams(self.algo, self.env_id).get("callback") or []
        callbacks = [*(own if isinstance(own, list) else [own]), f"{CALLBACKS}.EpisodeStatsCallback"]
        callbacks.append({LOG_EVERY: {"n_steps": max(self.steps // N_LOGS, 1)}})
        if self.algo == "ben":
            callbacks.append({f"{CALLBACKS}.BeliefCallback": {"n_steps": max(self.steps // N_PICTURES, 1)}})
        return callbacks

    def command(self) -> list[str]:
        """The command of the zoo; by our route to it, which works even where the start-up hook is switched off."""
        arguments = {
            "--algo": self.algo,
            "--env": self.env_id,
            "--seed": self.seed,
            "--n-timesteps": self.steps,
            "--log-folder": self.work / "zoo",
            "--tensorboard-log": self.work / "tensorboard",
            "--log-interval": -2,  # the callback logs
            "--eval-freq": max(self.steps // N_EVALUATIONS, 1),
            "--eval-episodes": self.eval_episodes,
            "--n-eval-envs": min(N_EVAL_ENVS, self.eval_episodes),
            "--num-threads": 1,
        }
        options = [str(part) for argument in arguments.items() for part in argument]
        return [
            sys.executable,
            "-m",
            "sb3_ben.zoo",
            "train",
            *options,
            "-params",
            *self.overrides,
            f"callback:{self.callbacks()!r}",
        ]

    def publish(self) -> None:
        """Move the events to where TensorBoard finds them, and remember the settings: the run is complete."""
        source = next((self.work / "tensorboard").glob("*/*/"))
        self.events.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(source, self.events)
        (self.work / "settings.json").write_text(json.dumps(self.settings()))

    def evaluations(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps and mean returns of the evaluations."""
        results = np.load(next((self.work / "zoo").rglob("evaluations.npz")))
        return results["timesteps"], results["results"].mean(axis=1)


def hyperparams(algo: str, env_id: str) -> dict[str, Any]:
    """The hyperparameters that the zoo will use; nothing where it has none."""
    import rl_zoo3
    import yaml

    from sb3_ben.zoo import config_file

    zoo_file = Path(rl_zoo3.__file__).parent / "hyperparams" / f"{algo}.yml"
    file = Path(config_file(algo, env_id, str(zoo_file)))
    entries = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return entries.get(env_id, entries.get("default", {}))


# ---------------------------------------------------------------------- training


class Trainer:
    """Trains runs in processes of their own, some at a time.

    :param jobs: how many at a time
    """

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.failed: list[Run] = []
        self._processes: dict[Run, subprocess.Popen[str]] = {}
        self._stopped = threading.Event()

    def train(self, runs: Sequence[Run]) -> None:
        """Train all runs; those that fail are listed in ``failed``."""
        with Progress() as progress, ThreadPoolExecutor(self.jobs) as pool:
            tasks = {run: progress.add_task(f"{run.name:14s}", total=run.steps) for run in runs}
            try:
                for future in [pool.submit(self._train, run, progress, tasks[run]) for run in runs]:
                    future.result()
            except BaseException:
                self._stop()
                raise

    def _train(self, run: Run, progress: Progress, task: Any) -> None:
        if self._stopped.is_set():
            return
        for folder in (run.work, run.events):
            shutil.rmtree(folder, ignore_errors=True)
        run.work.mkdir(parents=True)
        start = time.perf_counter()
        code = self._follow(run, progress, task)
        if code == 0:
            run.publish()
            progress.update(task, completed=run.steps)
            progress.console.print(f"{run.name} took {time.perf_counter() - start:.0f} s")
        elif not self._stopped.is_set():
            self.failed.append(run)
            progress.console.print(f"{run.name} failed, the end of {output_of(run)}:\n{tail(output_of(run))}", markup=False)

    def _follow(self, run: Run, progress: Progress, task: Any) -> int:
        """Run the command to its end, with its output in a file and its progress on the screen."""
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        # In a session of its own: at Ctrl-C the zoo would save what it has and report success
        process = subprocess.Popen(
            run.command(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, start_new_session=True
        )
        self._processes[run] = process
        if self._stopped.is_set():  # in the meantime
            process.terminate()
        assert process.stdout is not None
        with output_of(run).open("w") as output:
            for line in process.stdout:
                output.write(line)
                if (match := STEPS.search(line)) is not None:
                    progress.update(task, completed=min(int(match[1]), run.steps))
        return process.wait()

    def _stop(self) -> None:
        self._stopped.set()
        for process in list(self._processes.values()):
            if process.poll() is None:
                process.terminate()


def output_of(run: Run) -> Path:
    """What a run has printed."""
    return run.work / "output.txt"


def tail(path: Path) -> str:
    return "\n".join(path.read_text().splitlines()[-TAIL:])


# ---------------------------------------------------------------------- the oracle and the results


def write_oracle(env_id: str, folder: Path, steps: int) -> dict[str, float]:
    """Write the best known agent as a run of its own, with the tags of the learners: a line in each of their charts."""
    from stable_baselines3.common.env_util import make_vec_env
    from torch.utils.tensorboard import SummaryWriter

    world = world_of(make_vec_env(env_id)) if env_id in gym.registry else None
    statistics = oracle_statistics(world) if world is not None else {}
    shutil.rmtree(folder / "oracle", ignore_errors=True)
    with SummaryWriter(str(folder / "oracle")) as writer:
        writer.add_custom_scalars(custom_scalars_layout(world.stats if world is not None else ()))
        for name, value in statistics.items():
            tags = ["eval/mean_reward", "rollout/ep_rew_mean"] if name == "return" else [f"episode/{name}"]
            for tag in [f"oracle/{name}", *tags]:
                for step in (0, steps):
                    writer.add_scalar(tag, value, step)
    return statistics


def report(runs: Sequence[Run], oracle: dict[str, float]) -> None:
    """Print the last evaluation of each algorithm."""
    print(f"\n{'agent':12s}{'return':>10s}{'s.e.':>8s}   last evaluation of each seed ({runs[0].eval_episodes} episodes)")
    for algo in dict.fromkeys(run.algo for run in runs):
        last = np.array([run.evaluations()[1][-1] for run in runs if run.algo == algo])
        error = last.std(ddof=1) / np.sqrt(len(last)) if len(last) > 1 else np.nan
        print(f"{algo:12s}{last.mean():10.2f}{error:8.2f}   {' '.join(f'{value:.2f}' for value in last)}")
    if "return" in oracle:
        print(f"{'oracle':12s}{oracle['return']:10.2f}")


def start_tensorboard(folder: Path, port: int | None = None) -> str:
    """Start TensorBoard in the background of this process; return its address."""
    from tensorboard import program

    server = program.TensorBoard()
    server.configure(argv=[None, "--logdir", str(folder), *([] if port is None else ["--port", str(port)])])
    return server.launch()


def serve(folder: Path, port: int | None) -> None:
    """Show a folder until the user has seen enough."""
    print(f"\nTensorBoard shows {folder} at {start_tensorboard(folder, port)} (Ctrl-C ends it)", flush=True)
    threading.Event().wait()


# ---------------------------------------------------------------------- the command


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Say what is missing or misspelt before anything starts."""
    for module in ("rl_zoo3", "tensorboard"):
        if importlib.util.find_spec(module) is None:
            parser.error(f'{module} is not installed: pip install "sb3_ben[zoo]"')
    from rl_zoo3.utils import ALGOS as KNOWN

    from sb3_ben.zoo import register

    register()
    import rl_zoo3.import_envs  # noqa: F401  registers CartPoleNoVel-v1 among others

    names: list[tuple[str, str, Collection[str]]] = [("algorithm", algo, KNOWN) for algo in args.algos]
    for kind, name, known in [*names, ("environment", args.env, gym.registry)]:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            parser.error(f"no {kind} is called {name!r}" + (f", do you mean {close[0]!r}?" if close else ""))
    for algo in args.algos:
        if not hyperparams(algo, args.env):
            parser.error(f"there are no hyperparameters of {algo} for {args.env}")
    for name in ("seeds", "steps", "jobs", "eval_episodes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="Tiger-v0", help="environment id")
    parser.add_argument("--algos", nargs="+", default=list(ALGOS), help="algorithms of the zoo")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds of each")
    parser.add_argument("--steps", type=int, help="environment steps of each run; by default what BEN was tuned for")
    parser.add_argument("--eval-episodes", type=int, default=100, help="episodes of each evaluation")
    parser.add_argument("--hyperparams", nargs="+", default=[], metavar="NAME:VALUE", help="in place of the tuned ones, for all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--logdir", type=Path, default=Path("results/compare"), help="where everything is written")
    parser.add_argument("--port", type=int, help="of TensorBoard; by default the first free one from 6006 on")
    parser.add_argument("--no-serve", action="store_true", help="do not start TensorBoard in the end")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    folder = args.logdir.resolve() / args.env
    steps = args.steps or int(float(hyperparams("ben", args.env)["n_timesteps"]))
    runs = [
        Run(algo, args.env, seed, steps, args.eval_episodes, tuple(args.hyperparams), folder)
        for seed in range(args.seeds)
        for algo in args.algos
    ]
    trainer, missing = Trainer(args.jobs), [run for run in runs if not run.is_complete()]
    print(f"{args.env}, {steps:,} steps: {len(runs) - len(missing)} of {len(runs)} runs are complete")
    try:
        trainer.train(missing)
        complete = [run for run in runs if run not in trainer.failed]
        if not complete:
            return 1
        report(
            sorted(complete, key=lambda run: args.algos.index(run.algo)), write_oracle(args.env, folder / "tensorboard", steps)
        )
        if args.no_serve:
            print(f"\nTo see it: tensorboard --logdir {folder / 'tensorboard'}")
        else:
            serve(folder / "tensorboard", args.port)
    except KeyboardInterrupt:
        if not all(run.is_complete() or run in trainer.failed for run in runs):
            print("\nStopped. Complete runs are kept: the same command goes on from here.")
            return 130
    return 1 if trainer.failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this ends its runs
    sys.exit(main())
