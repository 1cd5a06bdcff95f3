"""Every experiment, with one command.

python -m benchmarks list                          what there is, what it costs, what has been run
python -m benchmarks run tiger_learned --jobs 2    train what has no result yet
python -m benchmarks report                        write docs/benchmarks.md and its figures from the results
python -m benchmarks forget tiger_learned --agents BEN    remove results, so that jobs are run again

See docs/benchmarks_howto.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.experiment import Experiment, Job, choose, load_all

ROOT = Path(__file__).resolve().parent.parent
RESULTS, SMOKE_RESULTS = ROOT / "benchmarks" / "results", ROOT / "results" / "smoke"
WORK = ROOT / "results" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"


def minutes(seconds: float) -> str:
    """A time in minutes, or hours."""
    return f"{seconds / 60:.1f} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"


def show(experiments: Sequence[Experiment], results: Path) -> None:
    """Print what there is."""
    from benchmarks.harness.running import missing

    def row(number: str, name: str, jobs: Sequence[Job], title: str) -> None:
        left = missing(jobs, results)
        cost, rest = (minutes(sum(job.cpu_seconds for job in some)) for some in (jobs, left))
        print(f"{number:>3s} {name:24s}{len(jobs):6d}{len(jobs) - len(left):6d}{cost:>10s}{rest:>10s}  {title}")

    print(f"{'':3s} {'experiment':24s}{'jobs':>6s}{'done':>6s}{'CPU':>10s}{'CPU left':>10s}  title")
    for experiment in experiments:
        row(str(experiment.number), experiment.name, experiment.jobs(), experiment.title)
    different = {job.digest(): job for experiment in experiments for job in experiment.jobs()}
    row("", "all", list(different.values()), "What experiments share is run, and counted here, once")


def run(experiments: Sequence[Experiment], args: argparse.Namespace) -> int:
    """Run what has no result yet."""
    from benchmarks.harness import records, running, store
    from benchmarks.harness.training import Places

    commit = records.commit()
    store.fold(args.results)  # what a run has left that was killed
    jobs = [job for experiment in experiments for job in experiment.jobs()]
    if args.agents is not None:
        jobs = [job for job in jobs if job.seed is None or job.agent in args.agents]
    todo = running.missing(jobs, args.results)
    outdated = sum(bool(store.outdated(job, args.results)) for job in todo)
    note = f", {outdated} of them anew because their settings have changed" if outdated else ""
    print(f"{len(jobs) - len(todo)} of {len(jobs)} jobs are complete, {len(todo)} to run{note}.")
    if not todo:
        return 0
    seconds = sum(job.cpu_seconds for job in todo)
    at_a_time = f", {args.jobs} at a time: about {minutes(seconds / args.jobs)}" if args.jobs > 1 else ""
    print(f"Expected CPU time {minutes(seconds)}{at_a_time}.", flush=True)
    places = Places(args.results, args.work, args.checkpoint_seconds, commit)
    try:
        errors = running.run(todo, places, args.jobs, args.backend, args.address)
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from here.")
        return 130
    finally:
        store.fold(args.results)
    left = running.missing(todo, args.results)
    if left and not errors:
        errors = [f"{len(left)} jobs have left no record in {args.results}: do all workers see this folder?"]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


def forget(experiments: Sequence[Experiment], args: argparse.Namespace) -> int:
    """Remove results, so that jobs are run again."""
    from benchmarks.harness import store

    jobs = [job for experiment in experiments for job in experiment.jobs() if args.agents is None or job.agent in args.agents]
    print(f"{store.forget(jobs, args.results)} records removed.")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--smoke", action="store_true", help="the smoke versions: everything, in seconds")
    shared.add_argument("--results", type=Path, help="folder of the raw results (default: benchmarks/results)")
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("names", nargs="+", metavar="NAME", help="experiments, or `all`")
    chosen.add_argument("--seeds", type=int, help="number of seeds, in place of the experiment's")
    chosen.add_argument(
        "--agents", nargs="+", metavar="AGENT", help="only these, by their labels (`run` needs the references, too)"
    )
    commands.add_parser("list", parents=[shared], help="what there is, what it costs, what has been run")
    runs = commands.add_parser("run", parents=[shared, chosen], help="train what has no result yet")
    runs.add_argument("--jobs", type=int, default=1, help="jobs at a time, one thread each; -1 for all of a cluster")
    runs.add_argument("--backend", choices=("loky", "ray", "dask"), default="loky", help="where jobs run (default: here)")
    runs.add_argument("--address", help="of a running Ray or Dask cluster")
    runs.add_argument("--work", type=Path, default=WORK, help="folder for checkpoints, shared by all machines")
    runs.add_argument("--checkpoint-seconds", type=float, default=120.0, help="time between two checkpoints of a job")
    commands.add_parser("forget", parents=[shared, chosen], help="remove results, so that jobs are run again")
    report = commands.add_parser("report", parents=[shared], help="write the page and its figures")
    report.add_argument(
        "--page", type=Path, help="where to write (default: docs/benchmarks.md; of smoke versions, beside their results)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    args.results = (args.results or (SMOKE_RESULTS if args.smoke else RESULTS)).resolve()  # wherever a worker's folder is
    experiments = load_all()
    if args.smoke:
        experiments = {name: experiment.as_smoke() for name, experiment in experiments.items()}
    if args.command == "list":
        show(list(experiments.values()), args.results)
        return 0
    if args.command == "report":
        from benchmarks.harness.report import write_report
        from benchmarks.harness.store import keys

        if not keys(args.results):
            parser.error(f"there are no results in {args.results}")
        page = args.page or (args.results / "benchmarks.md" if args.smoke else PAGE)
        print(f"Written to {write_report(list(experiments.values()), args.results, page)}")
        return 0
    chosen = chosen_experiments(parser, args, experiments)
    if args.command == "forget":
        return forget(chosen, args)
    if args.jobs < 1 and args.jobs != -1:
        parser.error("--jobs must be at least 1, or -1")
    if args.checkpoint_seconds < 0:
        parser.error("--checkpoint-seconds must not be negative")
    args.work = args.work.resolve()
    return run(chosen, args)


def chosen_experiments(
    parser: argparse.ArgumentParser, args: argparse.Namespace, experiments: dict[str, Experiment]
) -> list[Experiment]:
    """The experiments that are named, with the number of seeds that is asked for."""
    if args.seeds is not None and args.seeds < 1:
        parser.error("--seeds must be at least 1")
    try:
        chosen = list(experiments.values()) if "all" in args.names else choose(args.names, experiments)
    except ValueError as error:
        parser.error(str(error))
    known = {agent for experiment in chosen for agent in experiment.agents}
    if unknown := set(args.agents or ()) - known:
        parser.error(f"no agent is called {', '.join(sorted(unknown))}, known are {', '.join(sorted(known))}")
    return [with_seeds(experiment, args.seeds) for experiment in chosen]


def with_seeds(experiment: Experiment, seeds: int | None) -> Experiment:
    """The experiment with another number of seeds."""
    return experiment if seeds is None else dataclasses.replace(experiment, seeds=seeds)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
