"""Training of one job by rl-zoo3's own machinery, with checkpoints from which a killed run goes on."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
import shutil
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from joblib.externals.loky import ProcessPoolExecutor  # whose processes may have processes
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor, sync_envs_normalization

from benchmarks.harness import records, store
from benchmarks.harness.checkpoints import checkpoints, restore, save_checkpoint
from benchmarks.harness.experiment import EVALUATION_SEED, Job
from benchmarks.harness.references import config_of, make_reference
from sb3_ben import VecPreviousReward, evaluate_policy, make_vec
from sb3_ben.callbacks import episode_statistics, make_like, untouched_rng
from sb3_ben.envs.views import WorldEnv
from sb3_ben.zoo import config_file, register

register()
from rl_zoo3.exp_manager import ExperimentManager  # noqa: E402  after the registration, as a user of the zoo without the hook
from rl_zoo3.utils import ALGOS  # noqa: E402

N_SLOTS = 100  # environments that an evaluation runs side by side: the same for all agents, who meet the same worlds
PROGRESS, PID = "progress", "pid"  # files in the working folder of a job


@dataclass(frozen=True)
class Places:
    """Where a job writes; on a cluster, folders that all machines share.

    :param results: for records
    :param work: for checkpoints, progress and output, all of which is removed once the record is written
    :param checkpoint_seconds: time between two checkpoints
    :param commit: of the repository
    """

    results: Path
    work: Path
    checkpoint_seconds: float = 120.0
    commit: str = "unknown"

    def of(self, job: Job) -> Path:
        """The working folder of a job. Another configuration has another one: it must not go on from these checkpoints."""
        return self.work / f"{job.name}-{job.digest()}"


# ---------------------------------------------------------------------- the zoo


def make_known(algo: str) -> None:
    """Make an algorithm that the harness alone knows known to the zoo."""
    if algo == "ben_paper":
        from sb3_ben.ben.paper import PaperBEN

        ALGOS.setdefault(algo, PaperBEN)


class Manager(ExperimentManager):
    """The zoo's manager, which reads the hyperparameters and makes environments and model, for runs that may be interrupted.

    :param job: the job
    :param folder: its working folder
    :param checkpoint: the checkpoint to go on from
    """

    def __init__(self, job: Job, folder: Path, checkpoint: Path | None) -> None:
        trained_agent = "" if checkpoint is None else str(checkpoint / "model.zip")
        make_known(job.algo)
        super().__init__(
            argparse.Namespace(),
            job.algo,
            job.env.env_id,
            str(folder / "zoo"),
            n_timesteps=job.steps,
            eval_freq=-1,
            hyperparams={name: _made(value) for name, value in job.hyperparams().items()},
            env_kwargs=job.training_kwargs,
            trained_agent=trained_agent,
            seed=job.zoo_seed,
            verbose=0,
            device="cpu",
        )
        self.config = config_file(job.experiment.agents[job.agent].listed_algo, job.env.env_id, self.config)
        self.evaluation_seed = job.experiment.evaluation_seed
        self.vec_env_class = vectorized  # type: ignore[assignment]
        # as arguments of the zoo's own, no arguments at all would stand for those of training
        self._eval_env_kwargs_args = self.eval_env_kwargs = dict(job.env.kwargs)

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        """As the zoo does, without the monitor's file: an open file can be part of no checkpoint."""
        return super().create_envs(n_envs, eval_env, no_log=True)

    def evaluation_envs(self, n_envs: int) -> VecEnv:
        """Worlds for evaluation, the same ones at every call."""
        seed, self.seed = self.seed, self.evaluation_seed
        try:
            return self.create_envs(n_envs, eval_env=True)
        finally:
            self.seed = seed

    def _load_pretrained_agent(self, hyperparams: dict[str, Any], env: VecEnv) -> BaseAlgorithm:
        """The model as it was saved, with nothing reset."""
        model = ALGOS[self.algo].load(self.trained_agent, env=env, device=self.device, force_reset=False)
        replay_buffer = Path(self.trained_agent).with_name("replay_buffer.pkl")
        if isinstance(model, OffPolicyAlgorithm):
            model.load_replay_buffer(replay_buffer)
        return model

    def _save_config(self, saved_hyperparams: dict[str, Any]) -> None:
        """The record of the job holds the configuration."""


def vectorized(env_fns: list[Callable[[], gym.Env]]) -> VecEnv:
    """The zoo's environments, all of them in array operations where they are worlds of ours and nothing but a monitor is around
    them: the same episodes, several times as fast."""
    first = env_fns[0]()
    if not isinstance(first, Monitor) or not isinstance(first.unwrapped, WorldEnv):
        return DummyVecEnv([lambda: first, *env_fns[1:]])
    return VecMonitor(make_like(first.unwrapped.world, len(env_fns)))


def _made(value: Any) -> Any:
    """What a file declares as ``{make: package.module.function, ...}``."""
    if not isinstance(value, dict) or "make" not in value:
        return value
    module, _, function = value["make"].rpartition(".")
    return getattr(import_module(module), function)(**{name: part for name, part in value.items() if name != "make"})


# ---------------------------------------------------------------------- what happens in training


def clocks() -> dict[str, float]:
    """Wall and CPU time, in seconds."""
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


class Recorder(BaseCallback):
    """Keeps every episode, evaluates on the way and saves checkpoints, in both cases between an update and the next rollout,
    where nothing is half done.

    :param job: the job
    :param manager: the manager of its run
    :param places: where to write
    """

    def __init__(self, job: Job, manager: Manager, places: Places) -> None:
        super().__init__()
        self.job, self.manager, self.places = job, manager, places
        self.folder = places.of(job)
        self.episodes: dict[str, list[float]] = defaultdict(list)
        self.curve: dict[str, list[Any]] = defaultdict(list)
        self.times = {"wall": 0.0, "cpu": 0.0, "collect": 0.0, "update": 0.0}
        self.n_resumed = 0
        self._mark = clocks()
        self._saved = time.monotonic()
        self._shown = 0.0

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("episodes", "curve", "times", "n_resumed")}

    def set_state(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.n_resumed += 1

    def _count_time(self, phase: str | None) -> None:
        """Add the time since the last call to the clocks of training, unless it was spent on something else (``None``)."""
        now = clocks()
        if phase is not None:
            for clock in ("wall", "cpu"):
                self.times[clock] += now[clock] - self._mark[clock]
            self.times[phase] += now["cpu"] - self._mark["cpu"]
        self._mark = now

    def _on_training_start(self) -> None:
        self._count_time(None)

    def _on_rollout_start(self) -> None:
        self._count_time("update")
        if self.num_timesteps >= len(self.curve["step"]) * self._interval() and self.has_curve():
            self.evaluate()
        if time.monotonic() - self._saved >= self.places.checkpoint_seconds and self.num_timesteps > 0:
            save_checkpoint(self.folder, self.model, self)
            self._saved = time.monotonic()
        if time.monotonic() - self._shown > 1:
            (self.folder / PROGRESS).write_text(str(self.num_timesteps / self.job.steps))
            self._shown = time.monotonic()
        self._count_time(None)

    def has_curve(self) -> bool:
        return self.job.experiment.evaluation.points > 0

    def _interval(self) -> float:
        return self.job.steps / max(self.job.experiment.evaluation.points, 1)

    def _on_rollout_end(self) -> None:
        self._count_time("collect")

    def _on_step(self) -> bool:
        for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
            if done:
                self.episodes["step"].append(self.num_timesteps)
                self.episodes["return"].append(info["episode"]["r"])
                for name, value in episode_statistics(info).items():
                    self.episodes[name].append(value)
        return True

    def _on_training_end(self) -> None:
        self._count_time("update")

    def evaluate(self) -> None:
        """A point of the learning curve."""
        self.curve["step"].append(self.num_timesteps)
        self.curve["return"].append(evaluate(self.model, self.manager, self.job.experiment.evaluation.curve_episodes)["return"])


def play(agent: Any, venv: VecEnv, n_episodes: int) -> dict[str, np.ndarray]:
    """What an agent achieves: its returns and what the environment counts, episode by episode."""
    counts: dict[str, list[float]] = defaultdict(list)

    def collect(locals_: dict[str, Any], _: dict[str, Any]) -> None:
        if locals_["done"]:
            for name, value in episode_statistics(locals_["info"]).items():
                counts[name].append(value)

    with untouched_rng(EVALUATION_SEED):
        returns, _ = evaluate_policy(
            agent, venv, n_episodes, deterministic=True, callback=collect, return_episode_rewards=True, warn=False
        )
    return {"return": np.array(returns), **{name: np.array(values) for name, values in counts.items()}}


def new_worlds(model: BaseAlgorithm, manager: Manager, n_envs: int) -> VecEnv:
    """Worlds that training has not seen, normalised as in training, with the previous reward for those who read it."""
    training, venv = model.get_env(), manager.evaluation_envs(n_envs)
    assert training is not None
    sync_envs_normalization(training.venv if isinstance(training, VecPreviousReward) else training, venv)
    return VecPreviousReward(venv)


def evaluate(model: BaseAlgorithm, manager: Manager, n_episodes: int) -> dict[str, np.ndarray]:
    """Greedy episodes in worlds that training has not seen."""
    return play(model, new_worlds(model, manager, min(N_SLOTS, n_episodes)), n_episodes)


# ---------------------------------------------------------------------- jobs


@contextlib.contextmanager
def output_in(path: Path) -> Iterator[None]:
    """Have all that the zoo prints in a file."""
    with path.open("a") as file, contextlib.redirect_stdout(file):
        yield


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Have a job's folder for this process alone, until it ends in whatever way."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / PID).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"another process is at work in {folder}") from error
        file.truncate(0)
        print(os.getpid(), end="", file=file, flush=True)  # for whoever wants to know or to end it
        yield


def started(job: Job, places: Places) -> tuple[Manager, BaseAlgorithm, Recorder]:
    """A run where it was left. A checkpoint that a power cut has damaged is of no use: the run begins anew. It is removed only
    once that was possible: if nothing can be started, the checkpoint need not be at fault."""
    folder, unreadable = places.of(job), []
    for checkpoint in (*reversed(checkpoints(folder)), None):
        try:
            manager = Manager(job, folder, checkpoint)
            setup = manager.setup_experiment()
            assert setup is not None
            model, recorder = setup[0], Recorder(job, manager, places)
            if checkpoint is not None:
                restore(checkpoint, model, recorder)
            break
        except Exception:
            if checkpoint is None:
                raise
            print(f"{checkpoint} cannot be read:\n{traceback.format_exc()}")
            unreadable.append(checkpoint)
    for checkpoint in unreadable:
        shutil.rmtree(checkpoint, ignore_errors=True)
    return manager, model, recorder


def train(job: Job, places: Places) -> records.Record:
    """Train a job to its end, from where it was left."""
    from benchmarks.harness.metrics import METRICS

    manager, model, recorder = started(job, places)
    before = reset_peak_memory()
    callbacks: Any = [*manager.callbacks, recorder]
    remaining, is_new = job.steps - model.num_timesteps, recorder.n_resumed == 0
    model.learn(remaining, callback=callbacks, log_interval=None, reset_num_timesteps=is_new)  # type: ignore[arg-type]
    memory = peak_memory() - before
    if recorder.has_curve():
        recorder.evaluate()
    arrays = {f"train_{name}": np.array(values) for name, values in recorder.episodes.items()}
    arrays |= {f"curve_{name}": np.array(values) for name, values in recorder.curve.items()}
    final = evaluate(model, manager, job.experiment.evaluation.episodes)
    arrays |= {f"eval_{name}": values for name, values in final.items()}
    meta = {"times": recorder.times, "n_resumed": recorder.n_resumed, "memory_mb": memory, "steps": model.num_timesteps}
    for name in job.experiment.metrics:
        with untouched_rng(EVALUATION_SEED):
            found = METRICS[name](model, manager, recorder)
        arrays |= {f"metric_{key}": np.asarray(value) for key, value in found.items()}
    return records.Record(meta, arrays)


def measure_reference(job: Job) -> records.Record:
    """Evaluate an agent that is not trained, in the same worlds."""
    kwargs, n_episodes = dict(job.env.kwargs), job.experiment.evaluation.episodes
    start = clocks()
    agent = make_reference(job.agent, config_of(job.env.env_id, kwargs))
    episodes = play(agent, make_vec(job.env.env_id, min(N_SLOTS, n_episodes), seed=EVALUATION_SEED, **kwargs), n_episodes)
    times = {name: clock - start[name] for name, clock in clocks().items()}
    return records.Record({"times": times}, {f"eval_{name}": values for name, values in episodes.items()})


def run_job(job: Job, places: Places) -> str | None:
    """Run a job and write its record, unless there is one. All that goes wrong is returned, so that other jobs go on.

    :return: ``None``, or what went wrong
    """
    th.set_num_threads(1)
    folder = places.of(job)
    try:
        with alone_in(folder):
            if not store.has(job, places.results):
                with output_in(folder / "output.txt"):
                    record = measure_reference(job) if job.seed is None else train(job, places)
                _keep(record, job, places)
            shutil.rmtree(folder, ignore_errors=True)
    except Exception:
        return f"{job.name} failed:\n{traceback.format_exc()}"
    return None


def _keep(record: records.Record, job: Job, places: Places) -> None:
    """Write the record of a job, with what it was made of."""
    record.meta |= {
        "job": job.name,
        "agent": job.agent,
        "environment": job.environment,
        "seed": job.seed,
        "digest": job.digest(),
        "configuration": job.configuration(),
        "commit": places.commit,
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **records.provenance(),
    }
    store.keep(record, job, places.results)


def run_isolated(job: Job, places: Places) -> str | None:
    """:func:`run_job` in a process of its own, which has no memory of other jobs."""
    with ProcessPoolExecutor(1) as pool:
        return pool.submit(run_job, job, places).result()


# ---------------------------------------------------------------------- memory


def reset_peak_memory() -> float:
    """Forget the peak of this process's memory, where the system can (Linux); return what is in use now, in MB."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> float:
    """The largest amount of memory that this process had in use, in MB."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    unit = 1024**2 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
