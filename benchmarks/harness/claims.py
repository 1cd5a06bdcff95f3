"""Claims and the numbers that decide them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from rliable import metrics

from benchmarks.harness import statistics
from benchmarks.harness.experiment import Claim, Experiment
from benchmarks.harness.statistics import Interval, Results, number

PROBABILITY = 0.9  # that a run scores higher than one of another agent which is called worse


class Verdict(NamedTuple):
    """What the numbers say of a claim.

    :param holds: whether it holds; ``None`` where the numbers are missing
    :param evidence: the numbers
    :param note: what is still missing
    """

    holds: bool | None
    evidence: str
    note: str = ""

    def __str__(self) -> str:
        return {True: "**holds**", False: "**does not hold**", None: "not decided"}[self.holds] + self.note


def score_at_least(
    results: Results,
    agent: str,
    iqm: float = -np.inf,
    low: float | None = None,
    mean: float = -np.inf,
    score: str = "greedy",
) -> Verdict:
    """The normalised interquartile mean and the mean reach values, with all of their intervals; with ``low``, the interval of the
    former need only reach that. Not decided where an interval is not below a value either."""
    found, average = statistics.iqm(results, score)[agent], statistics.normalised_mean(results, score)[agent]
    evidence = f"IQM of {agent}: {found}" + ("" if mean == -np.inf else f", mean {average}")
    if found.high < iqm or average.high < mean:
        return Verdict(False, evidence)
    holds = found.value >= iqm and found.low >= (iqm if low is None else low) and average.low >= mean
    return Verdict(holds or None, evidence)


def improves(results: Results, agent: str, over: list[str], probability: float = PROBABILITY, score: str = "greedy") -> Verdict:
    """A run of one agent scores higher than one of others, with a probability above a value and more than by chance: even odds
    are below the interval. Not decided where neither this holds nor all of an interval is below the value."""
    found = {other: statistics.improvement(results, agent, other, score) for other in over}
    evidence = "; ".join(f"P({agent} > {other}) = {interval}" for other, interval in found.items())
    evidence += "" if probability == PROBABILITY else f"; asked: above {probability:g}"
    if all(interval.value > probability and interval.low > 0.5 for interval in found.values()):
        return Verdict(True, evidence)
    return Verdict(False if any(interval.high <= probability for interval in found.values()) else None, evidence)


def no_worse(results: Results, agent: str, than: str, score: str = "greedy") -> Verdict:
    """The numbers do not show that runs of one agent score lower than those of another: even odds are not above the interval."""
    found = statistics.improvement(results, agent, than, score)
    means = statistics.mean(results, score)
    evidence = f"P({agent} > {than}) = {found}; means {means[agent]} and {means[than]}"
    return Verdict(found.high >= 0.5, evidence)


def statistic_between(
    results: Results, agent: str, name: str, low: float = -np.inf, high: float = np.inf, stage: str = "eval"
) -> Verdict:
    """The mean of the return or of a count lies between two values, after training (``eval``) or while learning (``train``)."""
    found = statistics.statistic_interval(list(results.agents[agent].values()), name, stage)
    return Verdict(_between(found, low, high), f"mean {name} of {agent}: {found}")


def statistic_ratio(
    results: Results, agent: str, over: str, name: str, low: float = 0.0, high: float = np.inf, stage: str = "eval"
) -> Verdict:
    """The mean of a count, divided by that of another agent, lies between two values; not decided where both are 0."""
    mine, other = (statistics.run_means(list(results.agents[which].values()), name, stage) for which in (agent, over))
    found = statistics.ratio(mine, other, metrics.aggregate_mean)
    return Verdict(
        _between(found, low, high),
        f"mean {name}: {agent} {number(mine.mean())}, {over} {number(other.mean())}; ratio {found}",
    )


def _between(found: Interval, low: float, high: float) -> bool | None:
    """Whether all of an interval lies between two values; not decided where only a part of it does."""
    if low <= found.low and found.high <= high:
        return True
    return False if found.high < low or found.low > high else None


def increases(results: Results, agents: list[str], score: str = "greedy") -> Verdict:
    """The last of several agents is better than the first beyond both intervals, and no step between them makes it worse beyond
    them. Not decided where the intervals of the first and the last overlap."""
    found = statistics.iqm(results, score)
    row = [found[agent] for agent in agents]
    falls = row[-1].high < row[0].low or any(b.high < a.low for a, b in pairwise(row))
    holds = False if falls else True if row[-1].low > row[0].high else None
    return Verdict(holds, "; ".join(f"{agent}: {interval}" for agent, interval in zip(agents, row, strict=True)))


def covers(results: Results, agent: str, level: float, tolerance: float) -> Verdict:
    """Realised Bellman samples fall into the central predicted interval of a level about as often as they should."""
    shares = np.array([_share(record.arrays["metric_pit"], level) for record in results.agents[agent].values()])
    found = statistics.estimate({agent: shares}, metrics.aggregate_mean)[agent]
    return Verdict(
        _between(found, level - tolerance, level + tolerance), f"{agent}: a share of {found} in the central {100 * level:.0f} %"
    )


def _share(pit: np.ndarray, level: float) -> float:
    return float((np.abs(pit - 0.5) <= level / 2).mean())


def metric_ratio(results: Results, agent: str, over: str, metric: str, low: float = 0.0, high: float = np.inf) -> Verdict:
    """The median of a metric, divided by that of another agent, lies between two values."""
    mine, other = (
        np.array([float(record.arrays[f"metric_{metric}"]) for record in results.agents[which].values()])
        for which in (agent, over)
    )
    found = statistics.ratio(mine, other, metrics.aggregate_median)
    return Verdict(
        _between(found, low, high),
        f"{metric}: {agent} {number(float(np.median(mine)))}, {over} {number(float(np.median(other)))}; ratio {found}",
    )


TESTS: dict[str, Callable[..., Verdict]] = {
    function.__name__: function
    for function in (score_at_least, improves, no_worse, statistic_between, statistic_ratio, increases, covers, metric_ratio)
}


def decide(claim: Claim, experiment: Experiment, found: list[Results]) -> Verdict:
    """What the records say of a claim; a claim with no ``environment`` is about the first one."""
    arguments: dict[str, Any] = dict(claim.arguments)
    label = arguments.pop("environment", next(iter(experiment.environments)))
    results = next((results for results in found if results.environment == label), None)
    if results is None or not set(claim.agents()) <= set(results.agents):
        return Verdict(None, "not run")
    seeds = min(len(results.agents[agent]) for agent in claim.agents())
    verdict = TESTS[claim.test](results, **arguments)
    if seeds < min(experiment.seeds, statistics.FEWEST):  # too few for an interval
        verdict = verdict._replace(holds=None)
    return verdict._replace(note="" if seeds >= experiment.seeds else f" so far ({seeds} of {experiment.seeds} seeds)")
