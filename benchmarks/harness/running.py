"""Jobs on one machine or many: joblib has the processes, Ray or Dask the cluster, and the records say what is left to do."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed, parallel_config
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.harness import store
from benchmarks.harness.experiment import Job
from benchmarks.harness.training import PROGRESS, Places, run_isolated, run_job

BACKENDS = ("loky", "ray", "dask")
ATTEMPTS = 3  # a job whose process dies is tried this often
ROOT = Path(__file__).resolve().parent.parent.parent


@contextlib.contextmanager
def backend(name: str, address: str | None = None) -> Iterator[None]:
    """Have joblib run its jobs on one of its backends.

    :param name: ``loky`` (processes of this machine), ``ray`` or ``dask``
    :param address: of a running cluster; without one, Ray finds that of ``RAY_ADDRESS`` and both can start one on this machine
    """
    with contextlib.ExitStack() as stack:
        kwargs: dict[str, Any] = {"inner_max_num_threads": 1}
        if name == "ray":
            kwargs = {"ray_remote_args": _connect_to_ray(stack, address)}
        elif name == "dask":
            kwargs = {}
            _connect_to_dask(stack, address)
        stack.enter_context(parallel_config(backend=name, **kwargs))
        yield


def _connect_to_ray(stack: contextlib.ExitStack, address: str | None) -> dict[str, Any]:
    """Connect, and return what makes Ray restart a worker that has died and repeat its job."""
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise SystemExit('Ray is not installed: pip install "sb3_ben[benchmarks]"') from error
    if not ray.is_initialized():
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        ray.init(address, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}}, log_to_driver=False)
        stack.callback(ray.shutdown)
    register_ray()
    return {"num_cpus": 1, "max_restarts": ATTEMPTS, "max_task_retries": ATTEMPTS}


def _connect_to_dask(stack: contextlib.ExitStack, address: str | None) -> None:
    """Connect; Dask gives the jobs of a worker that has died to others by itself."""
    try:
        from distributed import Client
    except ImportError as error:
        raise SystemExit("Dask is not installed: pip install distributed") from error
    client = stack.enter_context(Client(address) if address else Client(threads_per_worker=1))
    if any(threads > 1 for threads in client.nthreads().values()):
        raise SystemExit("Jobs draw from the random generators of their process: start Dask's workers with --nthreads 1")


def missing(jobs: Sequence[Job], results: Path) -> list[Job]:
    """The jobs that have no record yet; of those that are the same but for their labels, the first."""
    different = {job.digest(): job for job in reversed(jobs)}
    return [job for job in jobs if different[job.digest()] is job and not store.has(job, results)]


def share_done(job: Job, places: Places) -> float:
    """How much of a job is done, between 0 and 1."""
    if not places.of(job).exists() and store.is_done(job, places.results):
        return 1.0
    with contextlib.suppress(OSError, ValueError):
        return min(float((places.of(job) / PROGRESS).read_text()), 1.0)
    return 0.0


@contextlib.contextmanager
def progress_of(jobs: Sequence[Job], places: Places) -> Iterator[None]:
    """Show how far the jobs are and the time that is left, from the files that they write, wherever they run."""
    columns = (TextColumn("{task.fields[jobs]}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    ended = threading.Event()
    console = Console(file=sys.stdout)  # a job in this very process has its output elsewhere
    with Progress(*columns, *times, speed_estimate_period=600, console=console, redirect_stdout=False) as progress:
        task = progress.add_task("", total=sum(job.cpu_seconds for job in jobs), jobs="")

        def update() -> None:
            shares = [share_done(job, places) for job in jobs]
            seconds = sum(share * job.cpu_seconds for share, job in zip(shares, jobs, strict=True))
            done = f"{sum(share == 1 for share in shares)} of {len(jobs)} jobs"
            if done != progress.tasks[0].fields["jobs"] and not console.is_terminal:  # where a bar would not be seen to move
                console.print(f"{done} after {progress.tasks[0].elapsed or 0:.0f} s")
            progress.update(task, completed=seconds, jobs=done)

        def watch() -> None:
            while not ended.wait(2):
                update()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            update()


def run(jobs: Sequence[Job], places: Places, n_jobs: int = 1, name: str = "loky", address: str | None = None) -> list[str]:
    """Run all jobs that have no record yet.

    A process that is killed takes joblib's whole pool of local processes down with it: what is still missing then is started
    again, and goes on from its checkpoints. Ray and Dask do the same for single jobs.

    :return: what went wrong, job by job
    """
    errors: list[str] = []
    with backend(name, address), progress_of(jobs, places):
        for attempt in range(1, ATTEMPTS + 1):
            try:
                todo = missing(jobs, places.results)
                outcomes = Parallel(n_jobs=n_jobs, batch_size=1)(
                    delayed(run_isolated if job.experiment.isolated else run_job)(job, places) for job in todo
                )
                errors = [outcome for outcome in outcomes if outcome is not None]
                break
            except BrokenProcessPool as error:
                print(f"A process has died (attempt {attempt} of {ATTEMPTS}): {error}", file=sys.stderr)
                errors = [str(error)]
    return errors
