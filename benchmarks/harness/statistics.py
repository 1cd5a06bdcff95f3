"""From raw records to scores with intervals, by rliable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rliable import library, metrics

from benchmarks.harness import store
from benchmarks.harness.experiment import Experiment, Job
from benchmarks.harness.records import Record
from benchmarks.harness.references import World, world
from sb3_ben.callbacks import untouched_rng

REPS = 2000  # bootstrap replications; a tenth of them for curves, a quarter for probabilities, which take long
WORST = 0.05  # the share of episodes whose mean is shown as the worst
FEWEST = 3  # seeds of an interval
N_BINS = 20  # of curves of the return while learning
SEED = 0  # of the bootstrap: the page is the same whenever it is made from the same records


class Interval(NamedTuple):
    """An estimate with its 95 % interval, which is NaN where too few runs are known."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.low):
            return number(self.value)
        return f"{number(self.value)} [{number(self.low)}, {number(self.high)}]"


def number(value: float) -> str:
    """A number with about three digits."""
    if np.isnan(value):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Results:
    """All that has been found in one environment of an experiment.

    :param experiment: the experiment
    :param environment: label of the environment
    :param agents: complete records by agent and seed
    :param references: records of the agents that know the problem
    """

    experiment: Experiment
    environment: str
    agents: dict[str, dict[int, Record]]
    references: dict[str, Record]

    @cached_property
    def world(self) -> World:
        env = self.experiment.environments[self.environment]
        return world(env.env_id, dict(env.kwargs))

    def zero_and_one(self) -> tuple[float, float]:
        """The mean returns that are scored 0 and 1."""
        known = self.world
        if known.bounds is not None:
            return known.bounds
        zero, one = (self.greedy(self.references[name]) for name in (known.zero, known.one))
        return zero, one if known.exact is None else known.exact

    def normalised(self, returns: Any) -> np.ndarray:
        """Returns on the scale from 0 to 1; NaN where both ends are the same, as in worlds too short to achieve anything."""
        zero, one = self.zero_and_one()
        return (np.asarray(returns, dtype=float) - zero) / (one - zero if one != zero else np.nan)

    def greedy(self, record: Record) -> float:
        """The mean return after training.

        Where the optimum is known, the optimal agent's returns in the same worlds are a control variate: what its mean owes to
        the luck of these worlds is taken off, as far as the agent shares it.
        """
        returns, exact = record.arrays["eval_return"].astype(float), self.world.exact
        if exact is None:
            return float(returns.mean())
        optimal = self.references[self.world.one].arrays["eval_return"].astype(float)
        variance = optimal.var()
        shared = np.mean((returns - returns.mean()) * (optimal - optimal.mean())) / variance if variance > 0 else 0.0
        return float(returns.mean() - shared * (optimal.mean() - exact))


def _episodes(record: Record) -> tuple[np.ndarray, np.ndarray]:
    """When the episodes of training ended and what they returned; one that returned nothing known where none did end."""
    if "train_step" not in record.arrays:
        return np.zeros(1), np.full(1, np.nan)
    return record.arrays["train_step"], record.arrays["train_return"].astype(float)


def tail(record: Record) -> float:
    """The mean return of the episodes that end in the last fifth of training; of the last one where none does."""
    step, returns = _episodes(record)
    return float(returns[step > min(0.8 * record.meta["steps"], step.max() - 1)].mean())


def cumulative(record: Record) -> float:
    """The sum of all returns in training, however many environments run side by side."""
    return float(_episodes(record)[1].sum())


def first(record: Record) -> float:
    """The mean return of the episodes in the first twentieth of training, at least of the first one of each environment."""
    step, returns = _episodes(record)
    return float(returns[step <= max(0.05 * record.meta["steps"], step.min())].mean())


#: what a run can be scored by
SCORES: dict[str, Callable[[Results, Record], float]] = {
    "greedy": lambda results, record: results.greedy(record),
    "tail": lambda results, record: tail(record),
    "cumulative": lambda results, record: cumulative(record),
    "first": lambda results, record: first(record),
}


def collect(experiment: Experiment, folder: Path) -> list[Results]:
    """The complete records of an experiment, by environment; an environment without its references is left out."""
    found: dict[str, Results] = {label: Results(experiment, label, {}, {}) for label in experiment.environments}
    for job in experiment.jobs():
        record = store.find(job, folder)
        if record is not None:
            _file(found[job.environment], job, record)
    return [results for results in found.values() if results.agents and _has_scale(results)]


def _file(results: Results, job: Job, record: Record) -> None:
    if job.seed is None:
        results.references[job.agent] = record
    else:
        results.agents.setdefault(job.agent, {})[job.seed] = record


def _has_scale(results: Results) -> bool:
    known = results.world
    return known.bounds is not None or {known.zero, known.one} <= set(results.references)


# ---------------------------------------------------------------------- estimates


def interquartile_mean(x: np.ndarray) -> np.ndarray:
    """rliable's ``aggregate_iqm`` of runs, at each point of a curve. A bootstrap has no need for all that SciPy checks in each of
    thousands of calls, which takes a hundred times as long."""
    cut = len(x) // 4
    return np.sort(x, axis=0)[cut : len(x) - cut].mean(axis=0)


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """rliable's, likewise: how often a run of the first is better than one of the second, ties counted half."""
    return float(np.sign(x - y.T).mean() + 1) / 2


def scores(results: Results, kind: str = "greedy") -> dict[str, np.ndarray]:
    """One score for each seed of each agent, in the units of returns."""
    score = SCORES[kind]
    return {agent: np.array([score(results, runs[seed]) for seed in sorted(runs)]) for agent, runs in results.agents.items()}


def estimate(values: dict[str, np.ndarray], aggregate: Callable[[np.ndarray], Any]) -> dict[str, Interval]:
    """rliable's stratified bootstrap over seeds, of one environment."""
    matrices = {name: one[:, None] for name, one in values.items() if len(one)}
    with untouched_rng(SEED):
        points, intervals = library.get_interval_estimates(matrices, lambda x: np.ravel(aggregate(x)), reps=REPS)
    return {name: _interval(points[name], intervals[name], len(values[name])) for name in points}


def _interval(point: Any, bounds: Any, n_runs: int) -> Interval:
    low, high = np.ravel(bounds) if n_runs >= FEWEST else (np.nan, np.nan)
    return Interval(float(np.ravel(point)[0]), float(low), float(high))


def iqm(results: Results, kind: str = "greedy") -> dict[str, Interval]:
    """The interquartile mean of normalised scores."""
    normalised = {name: results.normalised(values) for name, values in scores(results, kind).items()}
    return estimate(normalised, interquartile_mean)


def normalised_mean(results: Results, kind: str = "greedy") -> dict[str, Interval]:
    """The mean of normalised scores."""
    normalised = {name: results.normalised(values) for name, values in scores(results, kind).items()}
    return estimate(normalised, metrics.aggregate_mean)


def mean(results: Results, kind: str = "greedy") -> dict[str, Interval]:
    """The mean over seeds, in the units of returns."""
    return estimate(scores(results, kind), metrics.aggregate_mean)


def improvement(results: Results, agent: str, other: str, kind: str = "greedy") -> Interval:
    """The probability that a run of an agent scores higher than a run of another."""
    values = scores(results, kind)
    pair = {"pair": (values[agent][:, None], values[other][:, None])}
    with untouched_rng(SEED):
        points, intervals = library.get_interval_estimates(pair, probability_of_improvement, reps=REPS // 4)
    return _interval(points["pair"], intervals["pair"], min(len(values[agent]), len(values[other])))


def ratio(mine: np.ndarray, other: np.ndarray, aggregate: Callable[[np.ndarray], float]) -> Interval:
    """What is aggregated over the seeds of an agent, neither of them negative, divided by the same of another; NaN for 0 by 0."""

    def share(x: np.ndarray, y: np.ndarray) -> np.ndarray:  # of the sum: rises with the ratio, and is finite where that is not
        return aggregate(x) / np.array([aggregate(x) + aggregate(y)])

    pair = {"pair": (mine[:, None], other[:, None])}
    with untouched_rng(SEED), np.errstate(divide="ignore", invalid="ignore"):
        points, intervals = library.get_interval_estimates(pair, share, reps=REPS)
        point, bounds = (shares["pair"] / (1 - shares["pair"]) for shares in (points, intervals))
    return _interval(point, bounds, min(len(mine), len(other)))


def worst(runs: Sequence[Record]) -> float:
    """The mean of the worst twentieth of all episodes of the last evaluations."""
    returns = np.sort(np.concatenate([record.arrays["eval_return"] for record in runs]).astype(float))
    return float(returns[: max(int(WORST * len(returns)), 1)].mean())


def statistic(runs: Sequence[Record], name: str, prefix: str = "eval") -> float:
    """The mean of the return or of what the environment counts."""
    return float(run_means(runs, name, prefix).mean())


def statistic_interval(runs: Sequence[Record], name: str, prefix: str = "eval") -> Interval:
    """:func:`statistic` with its interval over seeds."""
    return estimate({"runs": run_means(runs, name, prefix)}, metrics.aggregate_mean)["runs"]


def run_means(runs: Sequence[Record], name: str, prefix: str) -> np.ndarray:
    """:func:`statistic` of each run."""
    return np.array([record.arrays[f"{prefix}_{name}"].astype(float).mean() for record in runs])


# ---------------------------------------------------------------------- curves


class Curve(NamedTuple):
    """Estimates along training: steps, and by agent the values and their intervals, as rliable plots them."""

    steps: np.ndarray
    values: dict[str, np.ndarray]
    intervals: dict[str, np.ndarray]


def greedy_curve(results: Results) -> Curve | None:
    """The interquartile mean of normalised greedy returns along training."""
    runs = {agent: list(found.values()) for agent, found in results.agents.items()}
    if any("curve_return" not in record.arrays for found in runs.values() for record in found):
        return None
    # algorithms evaluate where their rollouts end: all curves are read at the same steps
    steps = np.linspace(0, results.experiment.steps, results.experiment.evaluation.points + 1)
    matrices = {
        agent: np.stack([_interpolated(results, record, steps) for record in found])[:, None] for agent, found in runs.items()
    }
    return _curve(steps, matrices)


def _interpolated(results: Results, record: Record, steps: np.ndarray) -> np.ndarray:
    means, ends = results.normalised(record.arrays["curve_return"].astype(float).mean(axis=1)), record.arrays["curve_step"]
    return np.where(steps <= max(ends[-1], record.meta["steps"]), np.interp(steps, ends, means), np.nan)


def learning_curve(results: Results) -> Curve | None:
    """The interquartile mean of the normalised return while learning, exploration included."""
    edges = np.linspace(0, results.experiment.steps, N_BINS + 1)
    matrices = {}
    for agent, runs in results.agents.items():
        binned = np.stack([_binned(record, edges) for record in runs.values()])
        matrices[agent] = results.normalised(binned)[:, None]
    whole = ~np.isnan(np.concatenate(list(matrices.values()))).any(axis=(0, 1))
    if not whole.any():
        return None
    return _curve(edges[1:][whole], {agent: matrix[..., whole] for agent, matrix in matrices.items()})


def cumulative_curve(results: Results) -> Curve | None:
    """The interquartile mean of the sum of all returns up to a step, exploration included, in thousands. ``None`` on cart poles,
    whose scores have fixed ends: an episode lasts as long as it goes well there, and returns add up to the steps."""
    if results.world.bounds is not None:
        return None
    edges = np.linspace(0, results.experiment.steps, N_BINS + 1)
    matrices = {
        agent: np.stack([_sums(record, edges) for record in runs.values()])[:, None] for agent, runs in results.agents.items()
    }
    return _curve(edges, matrices)


def _sums(record: Record, edges: np.ndarray) -> np.ndarray:
    """The sums of the returns of the episodes that end until the edges, in thousands, the last of them with all episodes."""
    step, returns = _episodes(record)
    return returns / 1000 @ (np.minimum(step, edges[-1])[:, None] <= edges)


def _binned(record: Record, edges: np.ndarray) -> np.ndarray:
    """Mean returns of the episodes that end between the edges, NaN where none does."""
    step, returns = _episodes(record)
    which = np.searchsorted(edges, np.clip(step, 1, edges[-1]), side="left") - 1
    counts, sums = (np.bincount(which, weights=weights, minlength=len(edges) - 1) for weights in (None, returns))
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _curve(steps: np.ndarray, matrices: dict[str, np.ndarray]) -> Curve:
    with untouched_rng(SEED):
        values, intervals = library.get_interval_estimates(matrices, lambda x: interquartile_mean(x[:, 0]), reps=REPS // 10)
    for agent, matrix in matrices.items():
        if len(matrix) < FEWEST:
            intervals[agent] = np.full_like(intervals[agent], np.nan)
    return Curve(steps, values, intervals)
